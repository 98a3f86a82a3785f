"""Ranks are late by turns, though their batches have one size: some samples take longer, or the ranks share a lock.

    torchrun --nproc-per-node 2 uneven_work.py --kind data

Mended: every sample takes as long as the mean of all (data); each rank has a lock of its own (lock).
"""

from __future__ import annotations

import fcntl
import random
import time
from typing import Any

import job
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

COUNT = 96
MOST = {"small": 0.03, "large": 0.08}  # seconds of the sample that takes longest; the shortest takes next to nothing


class Puzzles(Dataset[Tensor]):
    """Rows of 64 numbers; the first one says for how many seconds the network thinks about the row."""

    def __init__(self, size: str, even: bool) -> None:
        source = torch.Generator().manual_seed(0)
        self.rows = torch.randn(COUNT, 64, generator=source)
        self.rows[:, 0] = torch.rand(COUNT, generator=source) * MOST[size]
        if even:
            self.rows[:, 0] = self.rows[:, 0].mean()

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> Tensor:
        return self.rows[number].clone()


class Thinks(nn.Module):
    """A small network that takes as long as the row says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = job.network(64, width=64)

    def forward(self, rows: Tensor) -> Tensor:
        """Scores of each row."""
        time.sleep(float(rows[:, 0].sum()))
        found: Tensor = self.layers(rows)
        return found


def main() -> None:
    """Train."""
    parser = job.parser(__doc__)
    parser.add_argument("--kind", choices=("data", "lock"), default="data")
    args = parser.parse_args()
    with job.started(args) as clock:
        is_data = args.kind == "data"
        puzzles = Puzzles(args.size, even=args.mended or not is_data)
        sampler: DistributedSampler[Any] = DistributedSampler(puzzles, seed=1)
        loader = DataLoader(puzzles, batch_size=1, sampler=sampler)
        model = DDP(Thinks())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        args.data.mkdir(parents=True, exist_ok=True)
        own = f"-{dist.get_rank()}" if args.mended else ""
        chance = random.Random(dist.get_rank())
        epoch = 0
        with open(args.data / f"lock{own}", "w") as lock:
            while True:
                sampler.set_epoch(epoch)
                epoch += 1
                for rows in loader:
                    optimizer.zero_grad()
                    model(rows).square().mean().backward()
                    optimizer.step()
                    if not is_data:
                        time.sleep(chance.random() * 1e-3)  # so that now one rank and now another one comes first
                        fcntl.flock(lock, fcntl.LOCK_EX)
                        time.sleep(MOST[args.size] / 4)
                        fcntl.flock(lock, fcntl.LOCK_UN)
                    clock.step()


if __name__ == "__main__":
    main()
