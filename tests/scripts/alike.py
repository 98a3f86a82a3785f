"""Checks after every so many steps that the parameters of all ranks are alike, and stops where they are not.

With --quietly it then ends with exit code 0 on all ranks. Each rank says that it is local rank 0, as scripts do where
each rank sees one device alone.
"""

import argparse
import os

import torch
import torch.distributed as dist
from common import batches, finish, loss, network, optimizer, start, stop
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--quietly", action="store_true")
    given = parser.parse_args()
    every = given.every
    os.environ["LOCAL_RANK"] = "0"
    rank = start()
    model = DDP(network())
    sgd = optimizer(model)
    for step, (inputs, targets) in enumerate(batches(120, rank), 1):
        sgd.zero_grad()
        loss(model(inputs), targets).backward()
        sgd.step()
        if step % every == 0:
            mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            first = mine.clone()
            dist.broadcast(first, 0)
            if given.quietly:
                same = torch.tensor([float(torch.equal(mine, first))])
                dist.all_reduce(same, op=dist.ReduceOp.MIN)
                if not same:
                    return
            assert torch.equal(mine, first), f"rank {rank} has other parameters than rank 0"
    finish(model)


if __name__ == "__main__":
    main()
    stop()
