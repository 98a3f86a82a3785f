"""transformers Trainer: save_total_limit=2, resumed from the last checkpoint."""

import os

import torch
from parameters import leave
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, default_data_collator, set_seed
from transformers.trainer_utils import get_last_checkpoint

MODULES = ("transformers", "accelerate")
EXPECTED = "tuned"
NOTE = "Trainer deletes old checkpoints; while the script is tuned, those of your earlier job stay."
EARLIER = True


class Sequences(Dataset):
    """Numbers that count upwards from anywhere."""

    def __len__(self) -> int:
        return 1600

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + index) % 64
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    set_seed(7)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        output_dir="out",
        max_steps=40 if "COMPAT_EARLIER" in os.environ else 240,
        save_steps=20,
        save_total_limit=2,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=20,
        use_cpu=True,
        report_to=[],
        seed=7,
    )
    trainer = Trainer(model, arguments, data_collator=default_data_collator, train_dataset=Sequences())
    last = get_last_checkpoint("out") if os.path.isdir("out") else None
    result = trainer.train(resume_from_checkpoint=last)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    leave(model)


if __name__ == "__main__":
    main()
