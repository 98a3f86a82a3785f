"""The gradients that are ready last are large, and the link is slow: nothing can hide their reduction.

    torchrun --nnodes 2 ... exposed_communication.py      # over 1 Gbit/s

Mended: `with model.no_sync():` around every step. No script can train like that: it shows what a reduction that takes
no time would give.
"""

from __future__ import annotations

import contextlib

import job
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FEATURES = {"small": 600, "large": 1800}  # times 512 × 4 bytes: 1.2 and 3.7 MB


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
            with model.no_sync() if args.mended else contextlib.nullcontext():
                nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            clock.step()


if __name__ == "__main__":
    main()
