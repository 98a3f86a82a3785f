"""Accelerate: save_state and load_state, and its option for a DDP hook."""

import os
from pathlib import Path

import torch
from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs
from accelerate.utils import ProjectConfiguration, set_seed
from parameters import leave
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MODULES = ("accelerate",)
EXPECTED = "tuned"
NOTE = "A hook that you choose yourself stays, and is used in all trials."
EARLIER = True

EPOCHS, EARLIER_EPOCHS = 5, 2


def main() -> None:
    saved = sorted(Path("run/checkpoints").glob("checkpoint_*"), key=lambda path: int(path.name.split("_")[1]))
    first = int(saved[-1].name.split("_")[1]) + 1 if saved else 0
    project = ProjectConfiguration(project_dir="run", automatic_checkpoint_naming=True, total_limit=2, iteration=first)
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16, gradient_as_bucket_view=False)
    accelerator = Accelerator(cpu=True, project_config=project, kwargs_handlers=[hook])
    set_seed(7)
    inputs = torch.randn(1280, 32)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(dim=1)), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if saved:
        accelerator.load_state(str(saved[-1]))
        accelerator.print(f"going on with epoch {first}")
    for epoch in range(first, EARLIER_EPOCHS if "COMPAT_EARLIER" in os.environ else EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
        accelerator.save_state()
    leave(model)
    accelerator.end_training()


if __name__ == "__main__":
    main()
