"""Rank 0 alone runs forwards through the DDP object, before the first step and in between."""

import torch
from common import batches, finish, loss, network, optimizer, start, stop
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    # In train mode, as many scripts do: neither eval() nor no_grad() alone tells an evaluation.
    return float(sum(loss(model(inputs), targets) for inputs, targets in batches(30, rank=0, seed=1)))


def main() -> None:
    rank = start()
    model = DDP(network())
    sgd = optimizer(model)
    for step, (inputs, targets) in enumerate(batches(120, rank)):
        if rank == 0 and step % 15 == 0:
            print(f"step {step}: {evaluate(model):.4f}")
        sgd.zero_grad()
        loss(model(inputs), targets).backward()
        sgd.step()
    finish(model)


if __name__ == "__main__":
    main()
    stop()
