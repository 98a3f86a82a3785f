"""torch.compile, given the network or the DDP object around it. Its front end alone, which needs no C++ compiler."""

import argparse

import torch
from common import batches, finish, loss, network, optimizer, start, stop
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--where", choices=("inside", "around", "method"), default="inside")
    where = parser.parse_args().where
    rank = start()
    net = network(64)
    model = DDP(torch.compile(net, backend="eager") if where == "inside" else net)
    if where == "method":
        model.compile(backend="eager")
    called = torch.compile(model, backend="eager") if where == "around" else model
    sgd = optimizer(model)
    for inputs, targets in batches(120, rank):
        sgd.zero_grad()
        loss(called(inputs), targets).backward()
        sgd.step()
    finish(model)


if __name__ == "__main__":
    main()
    stop()
