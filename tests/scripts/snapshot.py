"""Writes a snapshot each epoch and resumes from it when it finds one: a stale one trains nothing."""

import os

import torch
import torch.distributed as dist
from common import batches, finish, loss, network, optimizer, start, stop
from torch.nn.parallel import DistributedDataParallel as DDP

SNAPSHOT, EPOCHS = "snapshot.pt", 6


def main() -> None:
    rank = start()
    model = DDP(network())
    sgd = optimizer(model)
    first = 0
    if os.path.exists(SNAPSHOT):
        snapshot = torch.load(SNAPSHOT)
        model.module.load_state_dict(snapshot["model"])
        sgd.load_state_dict(snapshot["optimizer"])
        first = snapshot["epoch"] + 1
    dist.barrier()  # or a fast rank 0 would have written a new one before a slow rank looked
    for epoch in range(first, EPOCHS):
        for inputs, targets in batches(20, rank, seed=epoch):
            sgd.zero_grad()
            loss(model(inputs), targets).backward()
            sgd.step()
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": sgd.state_dict(), "epoch": epoch}
            torch.save(state, SNAPSHOT)
    print(f"rank {rank} trained epochs {first} to {EPOCHS - 1}")
    finish(model)


if __name__ == "__main__":
    main()
    stop()
