"""Each epoch is short and starts the loader's workers anew; each worker reads an index before its first sample.

    torchrun --nproc-per-node 2 epoch_start.py

Mended: `DataLoader(persistent_workers=True)`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import job
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

STEPS = 16  # of an epoch
BATCH = 4
ENTRIES = {"small": 5_000, "large": 200_000}  # of the index


def make_index(folder: Path, entries: int) -> None:
    """A JSON file that says where each sample is."""
    index = {
        f"sample {place}": {"shard": place % 7, "at": place * 100, "label": place % 10} for place in range(entries)
    }
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")


class Indexed(Dataset[tuple[Tensor, int]]):
    """Reads its index in the process that wants the first sample, as data sets of many files do."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.index: list[dict[str, int]] | None = None

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        if self.index is None:
            self.index = list(json.loads(self.file.read_text(encoding="utf-8")).values())
        found = self.index[number]
        return torch.full((256,), found["at"] / 1e6), found["label"]


def main() -> None:
    """Train."""
    args = job.options(__doc__)
    with job.started(args) as clock:
        entries = ENTRIES[args.size]
        folder = job.once(args.data / f"index{entries}", lambda at: make_index(at, entries))
        more: dict[str, Any] = {"persistent_workers": True} if args.mended else {}
        loader = DataLoader(Indexed(folder / "index.json"), batch_size=BATCH, num_workers=1, **more)
        model = DDP(job.network(256))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        while True:
            for inputs, targets in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                clock.step()


if __name__ == "__main__":
    main()
