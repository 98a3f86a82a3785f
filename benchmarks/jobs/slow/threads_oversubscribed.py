"""Each rank computes with more threads than it has cores, and the threads wait for each other.

    torchrun --nproc-per-node 2 threads_oversubscribed.py

Mended: without `torch.set_num_threads`; torchrun gives each of several ranks one thread.
"""

from __future__ import annotations

import job
import torch
from straggler import Convolutions
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

THREADS = {"small": 2, "large": 4}


def main() -> None:
    """Train."""
    args = job.options(__doc__)
    if not args.mended:
        torch.set_num_threads(THREADS[args.size])
    with job.started(args) as clock:
        model = DDP(Convolutions())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        inputs, targets = torch.randn(16, 1024), torch.arange(16) % 10
        while True:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            clock.step()


if __name__ == "__main__":
    main()
