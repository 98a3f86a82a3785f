"""The model is made of hundreds of small operations, so a GPU waits for each of them to be launched.

    torchrun --nproc-per-node 2 small_kernels.py

Mended: `torch.compile`, which makes a few large operations of them. A CPU shows nothing of this.
"""

from __future__ import annotations

import job
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

OPERATIONS = {"small": 200, "large": 1000}  # of a few microseconds each
WIDTH = 256


class Many(nn.Module):
    """Scales, shifts and bounds its inputs again and again. Without bounds its values would soon be infinite."""

    def __init__(self, operations: int) -> None:
        super().__init__()
        self.operations = operations
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        """Of the same shape as the inputs."""
        for _ in range(self.operations // 3):
            inputs = torch.tanh(inputs * self.scale + self.shift)
        return inputs


def main() -> None:
    """Train."""
    args = job.options(__doc__)
    with job.started(args) as clock:
        device = job.device()
        network: nn.Module = nn.Sequential(Many(OPERATIONS[args.size]), nn.Linear(WIDTH, 10)).to(device)
        if args.mended:
            network.compile()
        model = DDP(network)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        inputs, targets = torch.randn(8, WIDTH, device=device), torch.arange(8, device=device)
        while True:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            job.wait_for(device)
            clock.step()


if __name__ == "__main__":
    main()
