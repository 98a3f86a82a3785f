"""The script reads a value from the device after each part of the model, so the device waits for the next launches.

    torchrun --nproc-per-node 2 sync_points.py

Mended: the values stay on the device, and are read in every hundredth step. A CPU shows nothing of this.
"""

from __future__ import annotations

import job
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

PARTS = {"small": 20, "large": 60}  # after each of which a value is read
WIDTH, ROWS = 1024, 2048  # a part computes for about as long as it takes to launch


def part() -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())


class Watched(nn.Module):
    """Parts one after another, which are watched in every `every`-th pass."""

    def __init__(self, parts: int, every: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part() for _ in range(parts))
        self.every, self.passes = every, 0
        self.seen: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        """Of the same shape as the inputs."""
        self.passes += 1
        for layers in self.parts:
            inputs = layers(inputs)
            if self.passes % self.every == 0:
                self.seen.append(float(inputs.detach().mean()))
        return inputs


def main() -> None:
    """Train."""
    args = job.options(__doc__)
    with job.started(args) as clock:
        device = job.device()
        model = DDP(Watched(PARTS[args.size], every=100 if args.mended else 1).to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        inputs = torch.randn(ROWS, WIDTH, device=device)
        while True:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            clock.step()


if __name__ == "__main__":
    main()
