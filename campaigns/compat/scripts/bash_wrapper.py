"""Started by a bash wrapper (--no-python)."""

import os
import sys

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MODULES = ()
LAUNCH = "--no-python"
WORDS = ("0.05",)
EXPECTED = "tuned"
NOTE = "The launcher starts bash_wrapper.sh, which starts Python once and ends after it."


def main(rate: float) -> None:
    dist.init_process_group("gloo")
    rank, width = dist.get_rank(), int(os.environ["MODEL_WIDTH"])
    torch.manual_seed(28)
    model = DDP(
        nn.Sequential(nn.Linear(26, width), nn.Mish(), nn.Linear(width, width), nn.Mish(), nn.Linear(width, 13))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    torch.manual_seed(280 + rank)
    for step in range(160):
        inputs = torch.randn(32, 26)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :13].argmax(1))
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 40 == 39:
            print(f"{step + 1} {loss.item():.4f}")
            torch.save(model.module.state_dict(), "wrapped.pt")
    leave(model.module)


if __name__ == "__main__":
    main(float(sys.argv[1]))
    dist.destroy_process_group()
