"""Each batch is copied to the GPU from pageable memory, which is slow, and the script waits for it.

    torchrun --nproc-per-node 2 host_device_copy.py

Mended: `DataLoader(pin_memory=True)` and `batch.to(device, non_blocking=True)`. On a CPU nothing is copied.
"""

from __future__ import annotations

from typing import Any

import job
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

ROWS = {"small": 4096, "large": 24576}  # of 4 KiB each: 16 and 96 MiB in a batch
WIDTH = 1024
COUNT = 64  # batches of an epoch


class Batches(Dataset[Tensor]):
    """Whole batches, made once, in memory that a worker shares with the training process without a copy."""

    def __init__(self, rows: int) -> None:
        self.batches: list[Tensor] = [torch.randn(rows, WIDTH).share_memory_() for _ in range(2)]

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> Tensor:
        return self.batches[number % len(self.batches)]


def main() -> None:
    """Train."""
    args = job.options(__doc__)
    with job.started(args) as clock:
        device = job.device()
        pinned = args.mended and device.type == "cuda"
        # A worker in both: only then does a thread of the loader copy to pinned memory, while the GPU computes.
        workers: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
        loader = DataLoader(Batches(ROWS[args.size]), batch_size=None, pin_memory=pinned, **workers)
        model = DDP(nn.Sequential(nn.Linear(WIDTH, 2048), nn.ReLU(), nn.Linear(2048, 10)).to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        while True:
            for batch in loader:
                inputs = batch.to(device, non_blocking=args.mended)
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
                job.wait_for(device)
                clock.step()


if __name__ == "__main__":
    main()
