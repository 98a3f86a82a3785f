"""Activation checkpointing, non-reentrant."""

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

MODULES = ()
EXPECTED = "tuned"
NOTE = "Each block is computed a second time in the backward pass, with the random state of the first (dropout)."


class Encoder(nn.Module):
    """A small transformer whose layers are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(200, 64)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True) for _ in range(3)
        )
        self.last = nn.Linear(64, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return self.last(hidden.mean(1))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(6)
    model = DDP(Encoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    torch.manual_seed(60 + rank)
    for step in range(80):
        inputs = torch.randint(200, (16, 20))
        targets = inputs[:, 0] % 8
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
