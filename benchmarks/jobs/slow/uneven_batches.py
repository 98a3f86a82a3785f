"""Documents of very different length, one a batch: at each step the rank with the longest keeps the others waiting.

    torchrun --nproc-per-node 2 uneven_batches.py

Mended: the sampler sorts by length, so the ranks get documents of like length in the same step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import job
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler

COUNT = 64
WORDS = {"small": (40, 150), "large": (10, 400)}  # the shortest and the longest document


class Documents(Dataset[Tensor]):
    """Rows of 64 numbers, one for each word; a quarter of the documents are long."""

    def __init__(self, size: str) -> None:
        source = torch.Generator().manual_seed(0)
        short, long = WORDS[size]
        share = torch.rand(COUNT, generator=source)
        spread = share if size == "small" else torch.where(share < 0.75, share / 8, share)
        self.lengths = [int(short + (long - short) * one) for one in spread]
        self.rows = torch.randn(long, 64, generator=source)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> Tensor:
        return self.rows[: self.lengths[number]].clone()


class Shards(Sampler[int]):
    """Each rank's share of a new order every epoch; with `lengths`, neighbours by length are taken together."""

    def __init__(self, lengths: list[int] | None) -> None:
        self.lengths, self.epoch = lengths, 0

    def __iter__(self) -> Iterator[int]:
        source = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        ranks, rank = dist.get_world_size(), dist.get_rank()
        if self.lengths is None:
            order = torch.randperm(COUNT, generator=source).tolist()
            return iter(order[rank::ranks])
        order = sorted(range(COUNT), key=self.lengths.__getitem__)
        groups = torch.randperm(COUNT // ranks, generator=source).tolist()
        return iter([order[group * ranks + rank] for group in groups])


class _PerWord(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        ctx.words = inputs.shape[1]
        time.sleep(ctx.words * 1e-4)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(ctx.words * 2e-4)
        return gradients[0]


class Reader(nn.Module):
    """A recurrent network, and layers that take 0.3 ms a word."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.recurrent, self.after = nn.Linear(64, 64), nn.GRU(64, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, words: Tensor) -> Tensor:
        """Scores of each word."""
        read: Tensor = _PerWord.apply(self.before(words))  # type: ignore[no-untyped-call]
        found: Tensor = self.after(self.recurrent(read)[0])
        return found


def main() -> None:
    """Train."""
    args = job.options(__doc__)
    with job.started(args) as clock:
        documents = Documents(args.size)
        loader = DataLoader(documents, batch_size=1, sampler=Shards(documents.lengths if args.mended else None))
        model = DDP(Reader())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        while True:
            for words in loader:
                optimizer.zero_grad()
                model(words).square().mean().backward()
                optimizer.step()
                clock.step()


if __name__ == "__main__":
    main()
