"""A step has four backward passes, and DDP reduces the gradients after each of them.

    torchrun --nnodes 2 ... needless_reductions.py      # over 1 Gbit/s

Mended: `with model.no_sync():` around all of them but the last.
"""

from __future__ import annotations

import contextlib

import job
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FEATURES = {"small": 400, "large": 1200}  # times 512 × 4 bytes: 0.8 and 2.5 MB
PASSES = 4


def main() -> None:
    """Train."""
    args = job.options(__doc__)
    with job.started(args) as clock:
        first = nn.Linear(FEATURES[args.size], 512)
        model = DDP(nn.Sequential(first, job.network(512, width=32)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        inputs, targets = torch.randn(8, FEATURES[args.size]), torch.arange(8)
        while True:
            optimizer.zero_grad()
            for number in range(1, PASSES + 1):
                is_last = number == PASSES
                with model.no_sync() if args.mended and not is_last else contextlib.nullcontext():
                    nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            clock.step()


if __name__ == "__main__":
    main()
