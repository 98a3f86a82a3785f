"""Lightning Fabric: its own launch, accumulation by no_backward_sync, fabric.save."""

import torch
from lightning.fabric import Fabric
from parameters import leave
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MODULES = ("lightning",)
EXPECTED = "tuned"
NOTE = "Reductions that no_backward_sync skips are skipped while the script is tuned, too."


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(7)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(model, optimizer)
    inputs = torch.randn(3200, 32)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(dim=1)), batch_size=8, shuffle=True)
    loader = fabric.setup_dataloaders(loader)
    for epoch in range(2):
        for number, (inputs, targets) in enumerate(loader):
            is_accumulating = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                fabric.backward(loss)
            if not is_accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        fabric.print(f"epoch {epoch}: loss {fabric.all_reduce(loss.detach()).item():.4f}")
        fabric.save("last.ckpt", {"model": model, "optimizer": optimizer, "epoch": epoch})
    leave(model)


if __name__ == "__main__":
    main()
