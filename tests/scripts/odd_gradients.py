"""Gradients that a hook cannot carry.

`large` ones are beyond float16, `jumps` become so in every second step, `noise` has full rank and is new each step, and
`cancel` nearly cancel over the ranks.
"""

import argparse

import torch
from common import finish, optimizer, start, stop
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

WIDTH = 512


class Weights(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.second = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, wanted: torch.Tensor) -> torch.Tensor:
        return (self.first * wanted).sum() + (self.second * wanted).sum()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("large", "jumps", "noise", "cancel"))
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--from-step", type=int, default=0, help="plain gradients until then")
    parser.add_argument("--rebuild", type=int, default=10**9, help="a new DDP object every so many steps")
    args = parser.parse_args()
    rank = start()
    weights = Weights()
    sgd = optimizer(weights)
    source = torch.Generator().manual_seed(rank)
    plain = torch.outer(torch.linspace(0.5, 1, WIDTH), torch.linspace(1, 2, WIDTH))
    for step in range(args.steps):
        if step % args.rebuild == 0:
            model = DDP(weights)
        wanted = plain
        if step >= args.from_step:
            wanted = {
                "large": lambda: plain * 1e6,
                "jumps": lambda step=step: plain * (1e8 if step % 2 else 1),
                "noise": lambda: torch.randn(WIDTH, WIDTH, generator=source),
                "cancel": lambda: plain * 1e-4 + (2 * rank - 1),
            }[args.kind]()
        sgd.zero_grad()
        (model(wanted) * 1e-3 if args.kind == "noise" else model(wanted)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        sgd.step()
    print(f"rank {rank}: {float(model.module.first.detach().norm()):.6g}")
    finish(model)


if __name__ == "__main__":
    main()
    stop()
