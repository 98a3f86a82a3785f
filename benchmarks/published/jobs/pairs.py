"""Experiment C: ranks 2i and 2i+1 have a group of their own, and each does many all-reduces of a 10×10 tensor.

torchrun --nproc-per-node 4 pairs.py                  # two pairs, started as by torchrun
python pairs.py --spawns 4                            # the same, started by the script
python pairs.py --spawns 4 --way coalesced            # one all-reduce of all tensors
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WAYS = ("as written", "async", "coalesced")


def work(options: argparse.Namespace) -> None:
    """The loop of the report, or one that does the same; the slowest rank's seconds as a JSON line of rank 0."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if options.threads:
        torch.set_num_threads(options.threads)
    every = [[2 * pair, 2 * pair + 1] for pair in range(world // 2)]
    group = [dist.new_group(ranks) for ranks in every][rank // 2]
    for _ in range(options.groups - 1):  # groups that nothing uses
        for ranks in every:
            dist.new_group(ranks)
    tensors = [torch.full((10, 10), 1 / 2) for _ in range(options.calls)]
    dist.all_reduce(torch.ones(1), group=group)  # connects
    dist.barrier()
    began = time.perf_counter()
    for _ in range(options.repeats):
        if options.way == "coalesced":
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            dist.all_reduce(flat, group=group)
            for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(piece.view_as(tensor))
        elif options.way == "async":
            for one in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]:
                one.wait()
        else:
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)
    took = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(json.dumps({"seconds": float(took) / options.repeats}), flush=True)
    dist.barrier()


def _rank(number: int, options: argparse.Namespace, port: int) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    dist.init_process_group("gloo", rank=number, world_size=options.spawns)
    work(options)


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--spawns", type=int, default=0)
    parser.add_argument("--way", choices=WAYS, default=WAYS[0])
    parser.add_argument("--calls", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0, help="0: as torch chooses")
    parser.add_argument("--groups", type=int, default=1, help="groups of each pair, of which one is used")
    options = parser.parse_args()
    if not options.spawns:
        dist.init_process_group("gloo")
        work(options)
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    mp.spawn(_rank, (options, port), nprocs=options.spawns)  # type: ignore[attr-defined, no-untyped-call]


if __name__ == "__main__":
    main()
