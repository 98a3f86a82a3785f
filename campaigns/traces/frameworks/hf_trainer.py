"""transformers' Trainer with save_total_limit=2, which goes on from the last checkpoint."""

import os

import torch
from modes import EARLIER, FOLDER, SAVE_EVERY, Samples, acted, loss, mode, network, report, steps
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

MODULES = ("transformers", "accelerate")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.layers(inputs)
        return {"loss": loss(outputs, labels), "logits": outputs}


class Say(TrainerCallback):
    """Says when a checkpoint was written, and looks whether only two are there."""

    def on_save(self, args, state, control, **kwargs) -> None:
        if int(os.environ["RANK"]) == 0 and state.global_step < EARLIER + 60:
            kept = [name for name in os.listdir(args.output_dir) if name.startswith("checkpoint-")]
            assert f"checkpoint-{state.global_step}" in kept
            acted(state.global_step)


def collate(samples: list) -> dict[str, torch.Tensor]:
    return {"inputs": torch.stack([one for one, _ in samples]), "labels": torch.stack([two for _, two in samples])}


def main() -> None:
    out = FOLDER / "out"
    last = get_last_checkpoint(str(out)) if out.is_dir() else None
    if mode() == "real":
        names = sorted(path.name for path in out.glob("checkpoint-*"))
        expected = [f"checkpoint-{EARLIER - SAVE_EVERY}", f"checkpoint-{EARLIER}"] if last else []
        wrong = "" if names == expected else f"the checkpoints are {names}"
        if last and not os.path.exists(os.path.join(last, "trainer_state.json")):
            wrong = f"{last} is not complete"
        report(int(last.rpartition("-")[2]) if last else 0, wrong)
        return  # the Trainer would make its output folder, which is the real job's own business
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=max(steps(), EARLIER + 3),
        save_steps=SAVE_EVERY,
        save_strategy="steps",
        save_total_limit=2,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        ignore_data_skip=True,
        logging_steps=10**9,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
    )
    if mode() == "earlier":
        arguments.max_steps = EARLIER
    trainer = Trainer(Model(), arguments, data_collator=collate, train_dataset=Samples(), callbacks=[Say()])
    trainer.train(resume_from_checkpoint=last)
    print("trained to step", trainer.state.global_step, flush=True)


if __name__ == "__main__":
    main()
