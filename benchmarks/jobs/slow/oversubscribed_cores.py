"""The ranks of a host, or their threads, are more than its cores.

    torchrun --nproc-per-node 2 oversubscribed_cores.py --kind threads   # each has twice as many as there are cores
    torchrun --nproc-per-node 8 oversubscribed_cores.py --kind pairs     # four pairs that have nothing in common

Mended: a thread for each core that a rank can have; the first pair alone, and the other ranks wait until it has ended.
--size changes nothing.
"""

from __future__ import annotations

import os

import job
import torch
import torch.distributed as dist
from straggler import Convolutions
from torch import nn


def main() -> None:
    """Train."""
    parser = job.parser(__doc__)
    parser.add_argument("--kind", choices=("threads", "pairs"), default="threads")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    with job.started(args) as clock:
        rank, world = dist.get_rank(), dist.get_world_size()
        group, threads = None, 0
        if args.kind == "pairs":
            pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
            group = pairs[rank // 2]
        network = Convolutions()
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
        inputs, targets = torch.randn(8, 1024), torch.arange(8)
        if args.kind == "pairs" and args.mended and rank > 1:
            return
        while True:
            fitting = max(1, cores // world) if args.mended else 2 * cores
            if args.kind == "threads" and threads != fitting:
                torch.set_num_threads(threads := fitting)
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(inputs), targets).backward()
            job.average_gradients(network, group)
            optimizer.step()
            clock.step()


if __name__ == "__main__":
    main()
