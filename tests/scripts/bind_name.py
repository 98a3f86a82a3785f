"""Five ways to bind DDP's name; `--how` takes one."""

import argparse

import torch
import torch.nn.parallel.distributed
from common import batches, finish, loss, network, optimizer, start, stop
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def local_import(net: nn.Module) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(net)


HOW = {
    "from_import": lambda net: DDP(net),
    "torch_nn": lambda net: torch.nn.parallel.DistributedDataParallel(net),
    "nn_parallel": lambda net: nn.parallel.DistributedDataParallel(net),
    "own_module": lambda net: torch.nn.parallel.distributed.DistributedDataParallel(net),
    "local_import": local_import,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=HOW, default="from_import")
    how = HOW[parser.parse_args().how]
    rank = start()
    model = how(network())
    assert isinstance(model, DDP)
    sgd = optimizer(model)
    for inputs, targets in batches(120, rank):
        sgd.zero_grad()
        loss(model(inputs), targets).backward()
        sgd.step()
    finish(model)


if __name__ == "__main__":
    main()
    stop()
