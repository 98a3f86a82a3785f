"""Lightning's ModelCheckpoint with save_last and the best two; the job goes on from last.ckpt."""

import torch
from modes import FOLDER, SAVE_EVERY, Samples, acted, loss, mode, network, report, steps

import lightning  # isort: skip  # after modes, see there
from lightning.pytorch.callbacks import ModelCheckpoint  # isort: skip
from lightning.pytorch.loggers import CSVLogger  # isort: skip

MODULES = ("lightning",)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def training_step(self, batch, index):
        now = loss(self.layers(batch[0]), batch[1])
        self.log("loss", now)
        return now

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Say(ModelCheckpoint):
    def _save_checkpoint(self, trainer, filepath):
        super()._save_checkpoint(trainer, filepath)
        if trainer.is_global_zero and trainer.global_step < 80:
            acted(trainer.global_step)


def main() -> None:
    last = FOLDER / "checkpoints" / "last.ckpt"
    if mode() == "real":
        found = torch.load(last, weights_only=False)["global_step"] if last.exists() else 0
        report(found)
        print("would go on from step", found, flush=True)
        return
    saver = Say(FOLDER / "checkpoints", save_last=True, save_top_k=2, monitor="loss", every_n_train_steps=SAVE_EVERY)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=steps(),
        callbacks=[saver],
        logger=CSVLogger(FOLDER, flush_logs_every_n_steps=10),
        log_every_n_steps=5,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(Samples(), batch_size=4)
    trainer.fit(Module(), loader, ckpt_path=str(last) if last.exists() else None)


if __name__ == "__main__":
    main()
