"""Sends many small tensors, without DDP, or larger ones with --numbers.

With --spawns N it starts N ranks, which meet at a port of their own.
"""

import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(numbers: int, calls: int) -> None:
    torch.set_num_threads(1)
    small = torch.ones(numbers)
    for _ in range(calls):
        dist.all_reduce(small)
        small /= dist.get_world_size()
    assert small.tolist() == torch.ones(numbers).tolist()
    dist.destroy_process_group()


def rank(number: int, world: int, port: int, numbers: int, calls: int) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    dist.init_process_group("gloo", rank=number, world_size=world)
    work(numbers, calls)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--spawns", type=int, default=0)
    parser.add_argument("--numbers", type=int, default=100)
    parser.add_argument("--calls", type=int, default=600)
    options = parser.parse_args()
    if options.spawns:
        kept = socket.socket()  # bound, not listening: the kernel gives the port to nobody before rank 0 listens there
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        port = kept.getsockname()[1]
        mp.spawn(rank, (options.spawns, port, options.numbers, options.calls), nprocs=options.spawns)
    else:
        dist.init_process_group("gloo")
        work(options.numbers, options.calls)


if __name__ == "__main__":
    main()
