"""Saves the whole DDP object after each epoch, and goes on with the one that it finds, which was not constructed."""

import copy
import os

import torch
import torch.distributed as dist
from common import batches, finish, loss, network, optimizer, start, stop
from torch.nn.parallel import DistributedDataParallel as DDP

FOUND = "whole_object.pt"


def main() -> None:
    rank = start()
    model = torch.load(FOUND, weights_only=False) if os.path.exists(FOUND) else DDP(network())
    dist.barrier()  # or a fast rank 0 would have written one before a slow rank looked
    sgd = optimizer(model)
    average = copy.deepcopy(model)
    for epoch in range(3):
        for inputs, targets in batches(20, rank, seed=epoch):
            sgd.zero_grad()
            loss(model(inputs), targets).backward()
            sgd.step()
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.1)
                average(inputs)
        if rank == 0:
            torch.save(model, FOUND)
    finish(model, average)


if __name__ == "__main__":
    main()
    stop()
