"""A step computes for less time than messages take to travel.

    torchrun --nproc-per-node 2 small_batch.py

Mended: a batch of 64 times as many rows. A step then takes longer, and a sample far less.
"""

from __future__ import annotations

import job
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ROWS = {"small": 16, "large": 2}


def main() -> None:
    """Train."""
    args = job.options(__doc__)
    with job.started(args) as clock:
        layers: list[nn.Module] = [nn.Linear(64, 64)]
        for _ in range(6):
            layers += [nn.ReLU(), nn.Linear(64, 64)]
        model = DDP(nn.Sequential(*layers), bucket_cap_mb=0.02)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        inputs = torch.randn(ROWS[args.size] * (64 if args.mended else 1), 64)
        while True:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            clock.step()


if __name__ == "__main__":
    main()
