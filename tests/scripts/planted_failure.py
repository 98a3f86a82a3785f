"""Trains well until a trial turns gradient_as_bucket_view on; then fails in the way asked."""

import argparse
import os

import torch.distributed as dist
from common import batches, finish, loss, network, optimizer, start, stop
from torch.nn.parallel import DistributedDataParallel as DDP


def fail(kind: str, rank: int) -> None:
    if kind == "abort":  # as Gloo does on a collective mismatch: no Python code can catch it
        os.abort()
    if kind == "raise" and rank == 1:
        raise RuntimeError("planted: rank 1 cannot train with gradient_as_bucket_view")
    if kind == "hang" and rank == 1:
        dist.barrier()  # rank 0 waits for it in its backward pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=("abort", "raise", "hang"), required=True)
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    rank = start()
    model = DDP(network())
    sgd = optimizer(model)
    for inputs, targets in batches(args.steps, rank):
        if model.gradient_as_bucket_view:
            fail(args.kind, rank)
        sgd.zero_grad()
        loss(model(inputs), targets).backward()
        sgd.step()
    finish(model)


if __name__ == "__main__":
    main()
    stop()
