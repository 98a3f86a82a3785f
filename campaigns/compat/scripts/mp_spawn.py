"""Ranks that the script spawns itself (mp.spawn)."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MODULES = ()
RANKS = 1
EXPECTED = "as written: with one rank there is nothing to tune"
NOTE = (
    "Made for `python script.py`: start it by its ranks (init_process_group without spawn) and it can be tuned. The "
    "rendezvous by MASTER_PORT of such scripts waits in vain under torchrun itself; this one meets by a file."
)


def worker(rank: int, world: int, meeting: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    torch.manual_seed(12)
    model = DDP(nn.Sequential(nn.Linear(20, 100), nn.ReLU(), nn.Linear(100, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(120 + rank)
    for step in range(100):
        inputs = torch.randn(32, 20)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), (inputs[:, 0] > 0).long())
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 49:
            print(f"{step + 1} {loss.item():.4f}", flush=True)
            torch.save(model.state_dict(), "spawned.pt")
    leave(model.module, rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(2, os.path.join(folder, "meeting")), nprocs=2)
