"""TensorBoard: SummaryWriter, which writes from a thread, and a checkpoint that is replaced."""

import os

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter

MODULES = ("tensorboard",)
EXPECTED = "tuned"
NOTE = "The events of a tuning run vanish, so no run of its own appears in TensorBoard."


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    source = torch.Generator().manual_seed(rank)
    writer = SummaryWriter(flush_secs=1) if rank == 0 else None
    for step in range(1, 241):
        inputs = torch.randn(16, 32, generator=source)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(dim=1))
        loss.backward()
        optimizer.step()
        if writer is not None and step % 40 == 0:
            writer.add_scalar("loss", loss.item(), step)
            writer.add_histogram("weight", model.module[0].weight, step)
            torch.save({"step": step, "model": model.module.state_dict()}, "next.pt")
            os.replace("next.pt", "last.pt")
    if writer is not None:
        writer.close()
    leave(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
