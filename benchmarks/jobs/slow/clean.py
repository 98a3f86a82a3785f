"""A job in which nothing is slow: no finding is right.

torchrun --nproc-per-node 2 clean.py --kind compute  # convolutions, on a core for each rank
torchrun --nproc-per-node 2 clean.py --kind loader   # a worker that keeps up, ready in time for every step
torchrun --nproc-per-node 2 clean.py --kind overlap  # reductions that end before the backward pass does

--size and --mended change nothing.
"""

from __future__ import annotations

import os

import job
import torch
import torch.distributed as dist
from straggler import Convolutions
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

ROWS = {"compute": 64, "loader": 16, "overlap": 16}  # of a batch: latency is less than 3 % of a step
BATCHES = 500  # of an epoch


def main() -> None:
    """Train."""
    parser = job.parser(__doc__)
    parser.add_argument("--kind", choices=("compute", "loader", "overlap"), default="overlap")
    args = parser.parse_args()
    with job.started(args) as clock:
        if args.kind == "compute":
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})
        network = Convolutions() if args.kind == "compute" else job.network(1024, milliseconds=60, width=64)
        model = DDP(network)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        rows = ROWS[args.kind]
        data = TensorDataset(torch.randn(rows * BATCHES, 1024), torch.arange(rows * BATCHES) % 10)
        workers = 1 if args.kind == "loader" else 0
        loader = DataLoader(data, batch_size=rows, num_workers=workers, persistent_workers=workers > 0)
        while True:
            for inputs, targets in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                clock.step()


if __name__ == "__main__":
    main()
