"""Runs forward and backward inside optimizer.step(closure), as Lightning does."""

import torch
from common import batches, finish, loss, network, optimizer, start, stop
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    rank = start()
    model = DDP(network())
    sgd = optimizer(model)
    for inputs, targets in batches(120, rank):

        def closure(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
            sgd.zero_grad()
            error = loss(model(inputs), targets)
            error.backward()
            return error

        sgd.step(closure)
    finish(model)


if __name__ == "__main__":
    main()
    stop()
