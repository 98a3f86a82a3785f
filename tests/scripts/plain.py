"""The workhorse: nothing special, as long, wide and slow as asked."""

import argparse
import time

from common import batches, finish, loss, network, optimizer, start, stop
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds of waiting for data before each step")
    args = parser.parse_args()
    rank = start()
    model = DDP(network(args.width))
    sgd = optimizer(model)
    for inputs, targets in batches(args.steps, rank):
        time.sleep(args.sleep)
        sgd.zero_grad()
        loss(model(inputs), targets).backward()
        sgd.step()
    print(f"rank {rank} trained {args.steps} steps")
    finish(model)


if __name__ == "__main__":
    main()
    stop()
