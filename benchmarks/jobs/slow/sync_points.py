"""The script reads a value from the device after each part of the model, so the device waits for the next launches.

A part is many short operations and a long one. Where the script runs ahead, the short ones are launched while the long
one of the part before computes; where it has waited for that one, the device waits for each of their launches.

    torchrun --nproc-per-node 2 sync_points.py

Mended: the values stay on the device, and are read in every hundredth step. A CPU shows nothing of this.
"""

from __future__ import annotations

import job
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

PARTS = {"small": 20, "large": 60}  # after each of which a value is read
WIDTH, ROWS = 1024, 8192  # the long operation takes about as long as it takes to launch the short ones
SHORT = 20  # operations


class Watched(nn.Module):
    """One part again and again, so that gradients are small, which is watched in every `every`-th pass."""

    def __init__(self, parts: int, every: int) -> None:
        super().__init__()
        self.layer, self.gain = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.parts, self.every, self.passes = parts, every, 0
        self.seen: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        """Of the same shape as the inputs."""
        self.passes += 1
        for _ in range(self.parts):
            gain: Tensor = self.gain
            for _ in range(SHORT):
                gain = torch.tanh(gain)
            inputs = torch.relu(self.layer(inputs * gain))
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
