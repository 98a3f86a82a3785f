"""All ranks meet at barriers in each step, though the all-reduce of the gradients waits for all of them anyway.

    torchrun --nproc-per-node 4 needless_barriers.py --kind times   # before and behind each step, for clean times
    torchrun --nproc-per-node 2 needless_barriers.py --kind log     # rank 0 writes a line, and all others wait for it

Mended: no barrier. --size changes nothing.
"""

from __future__ import annotations

import tempfile

import job
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    """Train."""
    parser = job.parser(__doc__)
    parser.add_argument("--kind", choices=("times", "log"), default="times")
    args = parser.parse_args()
    with job.started(args) as clock, tempfile.TemporaryFile("w") as log:
        network = job.network(64, milliseconds=3, width=64)
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
        inputs, targets = torch.randn(8, 64), torch.arange(8)
        while True:
            if args.kind == "times" and not args.mended:
                dist.barrier()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(inputs), targets)
            loss.backward()
            job.average_gradients(network)
            optimizer.step()
            if args.kind == "log" and dist.get_rank() == 0:
                print(float(loss), file=log, flush=True)
            if not args.mended:
                dist.barrier()
            clock.step()


if __name__ == "__main__":
    main()
