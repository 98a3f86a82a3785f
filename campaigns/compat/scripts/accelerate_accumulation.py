"""Accelerate: gradient accumulation over four batches."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from parameters import leave
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MODULES = ("accelerate",)
EXPECTED = "tuned"
NOTE = "Accelerate skips the reduction of all but the last batch by itself, so nothing is left for defer_reductions."


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    set_seed(7)
    inputs = torch.randn(6400, 32)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(dim=1)), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = criterion(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.wait_for_everyone()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
        accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
    leave(model)
    accelerator.end_training()


if __name__ == "__main__":
    main()
