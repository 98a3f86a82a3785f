"""Sends many small tensors, without DDP, or larger ones with --numbers.

With --ranks N it starts N ranks, which meet at a port of their own: new processes, or with --by fork forks of it.
"""

import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(tensors: int, numbers: int, calls: int) -> None:
    torch.set_num_threads(1)
    small = [torch.ones(numbers) for _ in range(tensors)]
    for call in range(calls):
        one = small[call % tensors]
        dist.all_reduce(one)
        one /= dist.get_world_size()
    assert all(one.tolist() == torch.ones(numbers).tolist() for one in small)
    dist.destroy_process_group()


def rank(number: int, world: int, port: int, *of_work: int) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    dist.init_process_group("gloo", rank=number, world_size=world)
    work(*of_work)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--by", choices=("spawn", "fork"), default="spawn")
    parser.add_argument("--tensors", type=int, default=1, help="by turns; the calls of one build on each other")
    parser.add_argument("--numbers", type=int, default=100)
    parser.add_argument("--calls", type=int, default=600)
    options = parser.parse_args()
    of_work = (options.tensors, options.numbers, options.calls)
    if options.ranks:
        kept = socket.socket()  # bound, not listening: the kernel gives the port to nobody before rank 0 listens there
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        port = kept.getsockname()[1]
        told = (options.ranks, port, *of_work)
        mp.start_processes(rank, told, nprocs=options.ranks, start_method=options.by)
    else:
        dist.init_process_group("gloo")
        work(*of_work)


if __name__ == "__main__":
    main()
