"""Each rank that the launcher starts starts two more, which train: the process group has twice as many ranks."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FIRST = 2 * int(os.environ["RANK"])
WORLD = 2 * int(os.environ["WORLD_SIZE"])


def train(number: int) -> None:
    rank, meeting = FIRST + number, f"file://{os.environ['OUT']}/meeting"
    dist.init_process_group("gloo", meeting, rank=rank, world_size=WORLD, timeout=timedelta(seconds=100))
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 4))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(30):
        sgd.zero_grad()
        model(torch.full((2, 4), 1.0 + rank)).square().mean().backward()
        sgd.step()
    torch.save(model.module.state_dict(), f"{os.environ['OUT']}/rank{rank}.pt")
    dist.barrier()
    # Not through the destructors: a reducer and gloo's threads may wait for each other there (torch 2.13).
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    mp.start_processes(train, nprocs=2, start_method="fork")
