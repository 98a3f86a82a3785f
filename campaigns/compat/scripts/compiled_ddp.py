"""torch.compile: a compiled DDP model."""

import os

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MODULES = ()
EXPECTED = "tuned"
NOTE = "Dynamo cuts the compiled graph where DDP's buckets end, so bucket sizes stay as they are without --recompile."


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(4, 32, 5, padding=2),
        nn.ReLU(),
        nn.Conv1d(32, 64, 5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(5),
    )


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(10)
    net = network()
    net(torch.zeros(1, 4, 60))
    model = torch.compile(DDP(net), backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    data = torch.Generator().manual_seed(100 + rank)
    for step in range(120):
        signals = torch.randn(16, 4, 60, generator=data)
        labels = signals.abs().sum((1, 2)).long() % 5
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(signals), labels)
        loss.backward()
        optimizer.step()
        if step % 40 == 39:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"{step + 1} {mean.item():.4f}")
                torch.save(net.state_dict(), "compiled_ddp.pt")
    leave(net)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
