"""Accumulates four micro-batches to a step, the first three under no_sync().

Each rank says that it is local rank 0, as scripts do where each rank sees one device alone.
"""

import contextlib
import os

from common import batches, finish, loss, network, optimizer, start, stop
from torch.nn.parallel import DistributedDataParallel as DDP

ACCUMULATE = 4


def main() -> None:
    os.environ["LOCAL_RANK"] = "0"
    rank = start()
    model = DDP(network())
    sgd = optimizer(model)
    for number, (inputs, targets) in enumerate(batches(30 * ACCUMULATE, rank), start=1):
        last = number % ACCUMULATE == 0
        with contextlib.nullcontext() if last else model.no_sync():
            (loss(model(inputs), targets) / ACCUMULATE).backward()
        if last:
            sgd.step()
            sgd.zero_grad()
    finish(model)


if __name__ == "__main__":
    main()
    stop()
