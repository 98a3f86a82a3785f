"""Accumulates over several backward passes per step, each of which reduces; --by-hand has no_sync where it belongs."""

import argparse
import contextlib

import torch
from common import batches, finish, loss, network, start, stop
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--by-hand", action="store_true")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--batches", type=int, default=102, help="of one epoch; the last step of each may be shorter")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()
    rank = start()
    model = DDP(nn.Sequential(network(args.width), nn.BatchNorm1d(4)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(args.epochs):
        data = list(batches(args.batches, rank, epoch))
        for number, (inputs, targets) in enumerate(data, start=1):
            steps_now = number % args.micro_batches == 0 or number == len(data)
            with model.no_sync() if args.by_hand and not steps_now else contextlib.nullcontext():
                loss(model(inputs), targets).backward()
            if steps_now:
                if args.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                sgd.step()
                sgd.zero_grad()
    finish(model)


if __name__ == "__main__":
    main()
    stop()
