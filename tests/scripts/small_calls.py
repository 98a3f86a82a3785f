"""Sends many small tensors, without DDP. With --spawns N it starts N ranks, which meet at a port of their own."""

import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

CALLS = 600


def work() -> None:
    torch.set_num_threads(1)
    small = torch.ones(10, 10)
    for _ in range(CALLS):
        dist.all_reduce(small)
        small /= dist.get_world_size()
    assert small.tolist() == torch.ones(10, 10).tolist()
    dist.destroy_process_group()


def rank(number: int, world: int, port: int) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    dist.init_process_group("gloo", rank=number, world_size=world)
    work()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--spawns", type=int, default=0)
    options = parser.parse_args()
    if options.spawns:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        mp.spawn(rank, (options.spawns, port), nprocs=options.spawns)
    else:
        dist.init_process_group("gloo")
        work()


if __name__ == "__main__":
    main()
