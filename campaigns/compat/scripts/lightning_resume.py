"""Lightning: strategy ddp, ModelCheckpoint(save_last=True), resumed from last.ckpt."""

import os

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from parameters import leave
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MODULES = ("lightning",)
EXPECTED = "tuned"
NOTE = "The checkpoints that a tuning run writes vanish, so ckpt_path finds those of your earlier job."
EARLIER = True


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.layers(inputs), targets)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        inputs, targets = batch
        self.log("val_loss", nn.functional.cross_entropy(self.layers(inputs), targets), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


def main() -> None:
    L.seed_everything(7)
    inputs = torch.randn(1280, 32)
    data = TensorDataset(inputs, inputs[:, :10].argmax(dim=1))
    saver = ModelCheckpoint("checkpoints", monitor="val_loss", save_top_k=2, save_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1 if "COMPAT_EARLIER" in os.environ else 4,
        callbacks=[saver],
        logger=CSVLogger("logs"),
        log_every_n_steps=10,
    )
    model = Classifier()
    last = "checkpoints/last.ckpt"
    trainer.fit(
        model,
        DataLoader(data, batch_size=8, shuffle=True),
        DataLoader(data, batch_size=64),
        ckpt_path=last if os.path.exists(last) else None,
    )
    leave(model)


if __name__ == "__main__":
    main()
