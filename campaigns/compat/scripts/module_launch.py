"""Launched as a module of a package (-m pkg.train)."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from parameters import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from .module_launch_parts.network import Mixer, batch

MODULES = ()
LAUNCH = "-m"
WORDS = ("--epochs", "4", "--out", "weights")
EXPECTED = "tuned"
NOTE = "The same word as torchrun's: `autoddp -m pkg.train`; relative imports work in tuning too."


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    assert __spec__ is not None
    assert __package__
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(27)
    model = DDP(Mixer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = torch.Generator().manual_seed(270 + rank)
    for epoch in range(args.epochs):
        for _ in range(35):
            inputs, labels = batch(data)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
        if rank == 0:
            args.out.mkdir(exist_ok=True)
            torch.save(model.module.state_dict(), args.out / "mixer.pt")
            print(f"{__spec__.name}, epoch {epoch}: {loss.item():.4f}")
    leave(model.module)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
