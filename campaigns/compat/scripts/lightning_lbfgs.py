"""Lightning: LBFGS, which calls its closure several times in each step."""

import lightning as L
import torch
from parameters import leave
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MODULES = ("lightning",)
EXPECTED = "tuned"
NOTE = "A step has several forward and backward passes; autoddp counts optimizer steps."


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch, index):
        inputs, targets = batch
        return nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4, history_size=5)


def main() -> None:
    L.seed_everything(7)
    inputs = torch.randn(4096, 16)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :4].sum(dim=1, keepdim=True).sin()), batch_size=64)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=4, logger=False, default_root_dir="run"
    )
    model = Regression()
    trainer.fit(model, loader)
    leave(model)


if __name__ == "__main__":
    main()
