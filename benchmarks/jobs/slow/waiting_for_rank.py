"""A network is trained without DDP, and the other ranks wait for one of them.

    torchrun --nproc-per-node 4 waiting_for_rank.py --kind work    # rank 2 has more to compute
    torchrun --nproc-per-node 2 waiting_for_rank.py --kind log     # rank 0 describes all parameters after each step
    torchrun --nproc-per-node 4 waiting_for_rank.py --kind stages  # stage 1 of a pipeline has half of the layers

Mended: as much to compute as the others have; without it; the layers divided among all stages. --size changes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import job
import torch
import torch.distributed as dist
from torch import nn

MICRO_BATCHES = 8
LAYERS = 12
LAYER = 1e-3  # seconds of one pass


def stages(args: argparse.Namespace, clock: job.Clock) -> None:
    """Train a pipeline: all micro-batches go forward through the ranks, then all of them backward."""
    rank, world = dist.get_rank(), dist.get_world_size()
    weights = nn.Parameter(torch.zeros(64))
    optimizer = torch.optim.SGD([weights], lr=1e-3)

    def travel(whence: int, to: int) -> list[dist.Work]:
        sent = []
        for _ in range(MICRO_BATCHES):
            activations = torch.zeros(8, 64)
            if 0 <= whence < world:
                dist.recv(activations, whence)
            time.sleep(layers * LAYER)
            if 0 <= to < world:
                work = dist.isend(activations + weights.detach(), to)
                assert work is not None
                sent.append(work)
        return sent

    while True:
        of_others = LAYERS // (2 * (world - 1))
        layers = LAYERS // world if args.mended else LAYERS // 2 if rank == 1 else of_others
        for work in travel(rank - 1, rank + 1) + travel(rank + 1, rank - 1):
            work.wait()
        weights.grad = torch.ones_like(weights)
        optimizer.step()
        clock.step()


def main() -> None:
    """Train."""
    parser = job.parser(__doc__)
    parser.add_argument("--kind", choices=("work", "log", "stages"), default="work")
    args = parser.parse_args()
    with job.started(args) as clock, open(os.devnull, "w") as file:
        if args.kind == "stages":
            stages(args, clock)
        network = job.network(64, milliseconds=20, width=64)
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
        inputs, targets = torch.randn(8, 64), torch.arange(8)
        while True:
            if args.kind == "work" and dist.get_rank() == 2:
                job.set_computing(network, 20 if args.mended else 32)
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(inputs), targets).backward()
            job.average_gradients(network)
            optimizer.step()
            if args.kind == "log" and dist.get_rank() == 0 and not args.mended:
                for _ in range(24):
                    found = {}
                    for name, parameter in network.named_parameters():
                        found[name] = torch.histc(parameter.detach(), 32).tolist()
                    file.write(json.dumps(found))
            clock.step()


if __name__ == "__main__":
    main()
