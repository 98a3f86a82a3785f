"""A network with BatchNorm, whose ranks see different data; rank 0 alone has loaded running statistics.

Options bring in what makes the running statistics matter, or ranks differ in their forward passes.
"""

import argparse
import contextlib

import torch
from common import FEATURES, batches, finish, loss, network, optimizer, start, stop
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--freezes", type=int, metavar="N", help="from step N on BatchNorm uses its statistics")
    parser.add_argument("--queue", action="store_true", help="the network has a buffer of another kind")
    parser.add_argument("--evaluates", action="store_true", help="rank 0 alone runs a pass before every fourth step")
    parser.add_argument("--samples", type=int, help="in a batch; default: all")
    parser.add_argument("--joins", type=int, metavar="N", help="rank 0 has N batches, under join()")
    return parser.parse_args()


def main() -> None:
    args = options()
    rank = start()
    norm = nn.BatchNorm1d(FEATURES)
    if rank == 0:
        norm.running_mean.fill_(50)
    layers = nn.Sequential(norm, network())
    if args.queue:
        layers.register_buffer("queue", norm.running_mean.clone())
    model = DDP(layers)
    sgd = optimizer(model)
    steps = args.joins if args.joins is not None and rank == 0 else args.steps
    with contextlib.nullcontext() if args.joins is None else model.join():
        for step, (inputs, targets) in enumerate(batches(steps, rank)):
            if args.evaluates and rank == 0 and step % 4 == 0:
                model.eval()
                with torch.no_grad():
                    model(inputs)
                model.train()
            if args.freezes is not None and step >= args.freezes:
                norm.eval()
            inputs, targets = inputs[: args.samples], targets[: args.samples]
            sgd.zero_grad()
            loss(model((rank + 1) * inputs + rank), targets).backward()
            sgd.step()
    finish(model)


if __name__ == "__main__":
    main()
    stop()
