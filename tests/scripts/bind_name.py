"""Five ways to bind DDP's name; `--how` takes one, or all for five models trained together."""

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
    parser.add_argument("--how", choices=(*HOW, "all"), default="from_import")
    how = parser.parse_args().how
    rank = start()
    models = [bind(network()) for name, bind in HOW.items() if how in (name, "all")]
    assert all(isinstance(model, DDP) for model in models)
    sgd = optimizer(*models)
    for inputs, targets in batches(120, rank):
        sgd.zero_grad()
        sum(loss(model(inputs), targets) for model in models).backward()
        sgd.step()
    finish(*models)


if __name__ == "__main__":
    main()
    stop()
