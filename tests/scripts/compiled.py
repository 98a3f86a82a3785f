"""torch.compile, given the network or the DDP object around it. Its front end alone, which needs no C++ compiler.

Says how many graphs were compiled, which takes --slow seconds each; --shapes different batch sizes need as many.
"""

import argparse
import time

import torch
from common import batches, finish, loss, network, optimizer, start, stop
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--where", choices=("inside", "around", "method"), default="inside")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--shapes", type=int, default=1)
    parser.add_argument("--slow", type=float, default=0.0)
    options = parser.parse_args()
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        time.sleep(options.slow)
        return graph.forward

    def compiled(module):
        return torch.compile(module, backend=backend, dynamic=False)

    rank = start()
    net = network(options.width)
    model = DDP(compiled(net) if options.where == "inside" else net)
    if options.where == "method":
        model.compile(backend=backend)
    called = compiled(model) if options.where == "around" else model
    sgd = optimizer(model)
    for number, (inputs, targets) in enumerate(batches(120, rank)):
        size = len(inputs) - number % options.shapes
        sgd.zero_grad()
        loss(called(inputs[:size]), targets[:size]).backward()
        sgd.step()
    print(f"rank {rank} compiled {len(graphs)} graphs")
    finish(model)


if __name__ == "__main__":
    main()
    stop()
