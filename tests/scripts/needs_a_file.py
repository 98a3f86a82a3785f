"""Rank 1 trains only once rank 0 has written a file that it can see: each host must see the other's writes."""

import os
import time
from pathlib import Path

from common import batches, finish, loss, network, optimizer, start, stop
from torch.nn.parallel import DistributedDataParallel as DDP

PATIENCE = 8  # seconds


def main() -> None:
    rank = start()
    told = Path(os.environ["SHARED"]) / "told"
    if rank == 0:
        told.write_text("by rank 0")
    until = time.monotonic() + PATIENCE
    while not told.exists():
        if time.monotonic() > until:
            raise FileNotFoundError(f"rank {rank} waits in vain for {told}")
        time.sleep(0.1)
    model = DDP(network())
    sgd = optimizer(model)
    for inputs, targets in batches(120, rank):
        sgd.zero_grad()
        loss(model(inputs), targets).backward()
        sgd.step()
    finish(model)


if __name__ == "__main__":
    main()
    stop()
