"""Activation checkpointing, reentrant."""

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

MODULES = ()
EXPECTED = "tuned"
NOTE = "The reentrant kind runs a backward pass inside the backward pass."


class Network(nn.Module):
    """Blocks whose activations are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 128)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128)) for _ in range(4)
        )
        self.last = nn.Linear(128, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=True)
        return self.last(hidden)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(6)
    model = DDP(Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    torch.manual_seed(60 + rank)
    for step in range(120):
        inputs = torch.randn(32, 48)
        targets = inputs[:, :8].argmax(1)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 19:
            print(f"{step + 1} {loss.item():.4f}")
            torch.save(model.state_dict(), "last.pt")
    leave(model.module)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
