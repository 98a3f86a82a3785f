"""Lightning: accumulate_grad_batches=4, and ModelCheckpoint by steps."""

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from parameters import leave
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MODULES = ("lightning",)
EXPECTED = "tuned"
NOTE = "Lightning skips the reduction of all but the last batch by itself, so nothing is left for defer_reductions."


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch, index):
        inputs, targets = batch
        return nn.functional.cross_entropy(self.layers(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    L.seed_everything(7)
    inputs = torch.randn(6400, 32)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(dim=1)), batch_size=8, shuffle=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        accumulate_grad_batches=4,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint("checkpoints", every_n_train_steps=50)],
        logger=False,
    )
    model = Classifier()
    trainer.fit(model, loader)
    leave(model)


if __name__ == "__main__":
    main()
