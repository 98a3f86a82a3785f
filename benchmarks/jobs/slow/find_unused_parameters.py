"""DDP looks for unused parameters in every step, though all are used, and so never puts its buckets in order.

    torchrun --nnodes 2 ... find_unused_parameters.py      # over 1 Gbit/s

The network's layers are declared from the last to the first, as in many decoders. Buckets follow the order of
declaration until DDP has seen the order in which gradients become ready, and with this option it never does: the
bucket that is reduced first holds the gradients that are ready last.

Mended: DDP without `find_unused_parameters=True`.
"""

from __future__ import annotations

import job
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

WIDTH = {"small": 256, "large": 320}  # of 9 layers: 2.4 and 3.7 MB


class Backwards(nn.Module):
    """Layers that are declared from the last to the first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = list(job.network(width, milliseconds=60, width=width, depth=8).children())
        self.layers = nn.ModuleList(reversed(layers))

    def forward(self, inputs: Tensor) -> Tensor:
        """What the last layer gives."""
        for layer in reversed(self.layers):
            inputs = layer(inputs)
        return inputs


def main() -> None:
    """Train."""
    args = job.options(__doc__)
    with job.started(args) as clock:
        width = WIDTH[args.size]
        model = DDP(Backwards(width), bucket_cap_mb=1, find_unused_parameters=not args.mended)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        inputs, targets = torch.randn(8, width), torch.arange(8)
        while True:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            clock.step()


if __name__ == "__main__":
    main()
