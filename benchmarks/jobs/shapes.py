"""A plain DDP job with one of several models, which differ in the sizes of their gradients and in when they are ready.

    torchrun --nproc-per-node 2 jobs/shapes.py --model conv --steps 50 --times times.json

`mlp` has few large gradients, `conv` grows towards its end, `transformer` has many small ones and a large embedding.
With --sleep the model's computing is a sleep of so many milliseconds in each step, a third of it forward: hosts that
share cores then compute as fast as hosts that do not.
"""

import argparse
import itertools
import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Sleep(torch.autograd.Function):
    """Sleeps in both passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        """Sleep for `seconds`; twice as long in the backward pass."""
        ctx.seconds = 2 * seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sleep twice as long."""
        time.sleep(ctx.seconds)
        return gradients[0], None


class Sleeping(nn.Module):
    """A layer that sleeps instead of computing much: it is applied to one row."""

    def __init__(self, layer: nn.Module, seconds: float) -> None:
        super().__init__()
        self.layer, self.seconds = layer, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer, after a sleep."""
        found: torch.Tensor = self.layer(Sleep.apply(x, self.seconds))  # type: ignore[no-untyped-call]
        return found


class Words(nn.Module):
    """A small transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        self.head = nn.Linear(128, 100)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Scores of 100 classes for each word."""
        scores: torch.Tensor = self.head(self.layers(self.embedding(words)))
        return scores


def build(name: str, times: int) -> tuple[nn.Module, torch.Tensor]:
    """The model, and a batch for it, so many times as large as the smallest one."""
    if name == "mlp":
        return nn.Sequential(*(nn.Linear(768, 768) for _ in range(6))), torch.randn(16 * times, 768)
    if name == "conv":
        widths = [3, 32, 64, 128, 256, 512]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 2000)), torch.randn(4 * times, 3, 32, 32)
    return Words(), torch.randint(8000, (4 * times, 16))


def sleeping(milliseconds: float) -> tuple[nn.Module, torch.Tensor]:
    """Twelve layers of 2.25 MiB each, whose computing is a sleep."""
    each = milliseconds / 1e3 / 3 / 12
    return nn.Sequential(*(Sleeping(nn.Linear(768, 768), each) for _ in range(12))), torch.randn(1, 768)


def main() -> None:
    """Train, then leave the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("mlp", "conv", "transformer"), default="mlp")
    parser.add_argument("--batch-times", type=int, default=1, metavar="N", help="a batch that is N times as large (1)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--sleep", type=float, metavar="MS", help="computing is a sleep (the model is one of its own)")
    parser.add_argument("--times", metavar="FILE", help="rank 0 writes the seconds of every rank's steps here")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network, batch = sleeping(args.sleep) if args.sleep else build(args.model, args.batch_times)
    model = DDP(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    seconds = []
    for _ in range(args.steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, seconds)
    if args.times and dist.get_rank() == 0:
        with open(args.times, "w", encoding="utf-8") as file:
            json.dump(everyone, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Not through the interpreter's own end: a thread of torch 2.13's gloo that waits for the GIL may abort there.
    os._exit(0)
