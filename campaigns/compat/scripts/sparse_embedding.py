"""Sparse gradients of an embedding."""

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MODULES = ()
EXPECTED = "tuned"
NOTE = "A sparse gradient is reduced in a bucket of its own; SparseAdam updates only the rows that were read."


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(5000, 32, mode="mean", sparse=True)
        self.head = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, bags: torch.Tensor) -> torch.Tensor:
        return self.head(self.items(bags)).squeeze(1)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(8)
    model = DDP(Recommender())
    of_items = torch.optim.SparseAdam(model.module.items.parameters(), lr=1e-2)
    of_head = torch.optim.Adam(model.module.head.parameters(), lr=1e-3)
    torch.manual_seed(80 + rank)
    for step in range(150):
        bags = torch.randint(5000, (64, 12))
        clicked = ((bags % 2).float().mean(1) > 0.5).float()
        of_items.zero_grad()
        of_head.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(bags), clicked)
        loss.backward()
        assert model.module.items.weight.grad.is_sparse
        of_items.step()
        of_head.step()
        if rank == 0 and step % 50 == 49:
            print(f"{step + 1} {loss.item():.4f}")
            torch.save(model.state_dict(), "recommender.pt")
    leave(model.module)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
