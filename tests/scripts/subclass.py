"""A subclass of DDP with a constructor, a forward and an attribute of its own."""

import torch
from common import batches, finish, loss, network, optimizer, start, stop
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class ScaledDDP(DistributedDataParallel):
    def __init__(self, scale: float, module: nn.Module) -> None:
        super().__init__(module)
        self.scale = scale
        self.forwards = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return self.scale * super().forward(inputs)


def main() -> None:
    rank = start()
    model = ScaledDDP(0.5, network())
    sgd = optimizer(model)
    steps = 0
    for inputs, targets in batches(120, rank):
        sgd.zero_grad()
        loss(model(inputs), targets).backward()
        sgd.step()
        steps += 1
    assert model.forwards == steps
    assert model.scale == 0.5
    finish(model)


if __name__ == "__main__":
    main()
    stop()
