"""Every 10th step takes much longer, on all ranks.

torchrun --nproc-per-node 2 periodic_stall.py --kind collect     # Python's garbage collector walks a large heap
torchrun --nproc-per-node 2 periodic_stall.py --kind checkpoint  # each rank saves its shard and waits for the disk

Mended: the collector is called once at the start, with `gc.freeze()`; a thread saves the checkpoint.
"""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import job
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

EVERY = 10
OBJECTS = {"small": 300_000, "large": 3_000_000}
MEGABYTES = {"small": 2, "large": 7}  # a rank and time; 40 MB/s of a slow disk take 0.1 and 0.35 s for two ranks


def save(state: Any) -> None:
    """Write it, wait for the disk, take the place of the last one."""
    path = f"periodic_stall{dist.get_rank()}.pt"
    with open(path + ".new", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)


def main() -> None:
    """Train."""
    parser = job.parser(__doc__)
    parser.add_argument("--kind", choices=("collect", "checkpoint"), default="collect")
    args = parser.parse_args()
    with job.started(args) as clock:
        network = job.network(256)
        model = DDP(network)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        inputs, targets = torch.randn(8, 256), torch.arange(8)
        collects, saves = args.kind == "collect", args.kind == "checkpoint"
        samples = [{"id": number} for number in range(OBJECTS[args.size])] if collects else []
        state = torch.zeros(MEGABYTES[args.size] * 250_000) if saves else None
        if args.mended:
            gc.collect()
            gc.freeze()
        saving: threading.Thread | None = None
        step = 0
        while True:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            step += 1
            if step % EVERY == 0 and collects and not args.mended:
                gc.collect()
            if step % EVERY == 0 and saves and args.mended:
                if saving is not None:
                    saving.join()
                saving = threading.Thread(target=save, args=({"state": state},), daemon=True)
                saving.start()
            elif step % EVERY == 0 and saves:
                save({"state": state})
            assert len(samples) == (OBJECTS[args.size] if collects else 0)
            clock.step()


if __name__ == "__main__":
    main()
