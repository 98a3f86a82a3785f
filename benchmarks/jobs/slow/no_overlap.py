"""One bucket holds all gradients, so their reduction begins when the backward pass has ended.

    torchrun --nnodes 2 ... no_overlap.py      # over 1 Gbit/s

Mended: DDP without the `bucket_cap_mb=1000`, and with one of 0.5, which the fix names.
"""

from __future__ import annotations

import job
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

WIDTH = {"small": 256, "large": 320}  # of 9 layers: 2.4 and 3.7 MB


def main() -> None:
    """Train."""
    args = job.options(__doc__)
    with job.started(args) as clock:
        network = job.network(WIDTH[args.size], milliseconds=60, width=WIDTH[args.size], depth=8)
        model = DDP(network, bucket_cap_mb=0.5 if args.mended else 1000)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        inputs, targets = torch.randn(8, WIDTH[args.size]), torch.arange(8)
        while True:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            clock.step()


if __name__ == "__main__":
    main()
