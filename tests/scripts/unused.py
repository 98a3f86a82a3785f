"""DDP looks for unused parameters, though none is unused; from step N of `--from-step N` rank 1 leaves one out.

From step N of `--probes-from N` each step begins with the gradients of the inputs, by `torch.autograd.grad`.
"""

import argparse

import torch
from common import batches, finish, loss, network, optimizer, start, stop
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class MayLeaveOut(nn.Module):
    """The network, and a layer after it that a call may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.last = network(), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor, leaves_out: bool) -> torch.Tensor:
        found: torch.Tensor = self.network(inputs)
        return found if leaves_out else self.last(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--from-step", type=int)
    parser.add_argument("--probes-from", type=int)
    args = parser.parse_args()
    rank = start()
    model = DDP(MayLeaveOut(), find_unused_parameters=True)
    sgd = optimizer(model)
    for step, (inputs, targets) in enumerate(batches(args.steps, rank)):
        leaves_out = args.from_step is not None and step >= args.from_step and rank == 1
        if args.probes_from is not None and step >= args.probes_from:
            probed = inputs.clone().requires_grad_()
            torch.autograd.grad(loss(model(probed, False), targets), probed)
        sgd.zero_grad()
        loss(model(inputs, leaves_out), targets).backward()
        sgd.step()
    finish(model)


if __name__ == "__main__":
    main()
    stop()
