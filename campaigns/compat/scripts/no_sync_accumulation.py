"""Gradient accumulation by no_sync."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MODULES = ()
EXPECTED = "tuned"
NOTE = "Three of four micro-batches reduce nothing; a step is one optimizer step."
MICRO = 4


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(21)
    model = DDP(nn.Sequential(nn.Linear(28, 300), nn.ELU(), nn.Linear(300, 300), nn.ELU(), nn.Linear(300, 7)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)
    torch.manual_seed(210 + rank)
    optimizer.zero_grad()
    for batch in range(1, 120 * MICRO + 1):
        inputs = torch.randn(16, 28)
        is_last = batch % MICRO == 0
        with nullcontext() if is_last else model.no_sync():
            loss = nn.functional.cross_entropy(model(inputs), inputs[:, :7].argmax(1)) / MICRO
            loss.backward()
        if is_last:
            optimizer.step()
            warmup.step()
            optimizer.zero_grad()
        if rank == 0 and batch % 160 == 0:
            print(f"{batch // MICRO} {loss.item() * MICRO:.4f}")
            torch.save(model.module.state_dict(), "accumulated.pt")
    leave(model.module)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
