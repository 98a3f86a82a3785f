"""The script makes process groups in each step, in place of keeping them.

    torchrun --nproc-per-node 4 too_many_groups.py --kind halves   # two groups of two ranks, which are destroyed again
    torchrun --nproc-per-node 2 too_many_groups.py --kind metrics  # a group of all ranks for each measurement

Mended: made once, before the loop. Computing is sleeping; --size changes nothing.
"""

from __future__ import annotations

import argparse
import time

import job
import torch
import torch.distributed as dist

COMPUTING = 0.03  # seconds of a step


def halves(args: argparse.Namespace, clock: job.Clock) -> None:
    """Each half of the ranks has a gradient of its own."""
    world = dist.get_world_size()
    members = [list(range(world // 2)), list(range(world // 2, world))]
    mine = 2 * dist.get_rank() // world
    gradient = torch.ones(20_000)
    kept = [dist.new_group(ranks) for ranks in members] if args.mended or args.turns else []
    while True:
        time.sleep(COMPUTING)
        groups = kept if args.mended else [dist.new_group(ranks) for ranks in members]
        dist.all_reduce(gradient, group=groups[mine])
        gradient /= world // 2
        if not args.mended:
            dist.destroy_process_group(groups[mine])
        clock.step()


def measured(value: float, group: dist.ProcessGroup | None) -> float:
    """The mean of a measurement over the ranks."""
    of_all = torch.full((64,), value)
    dist.all_reduce(of_all, group=group or dist.new_group())
    return float(of_all[0]) / dist.get_world_size()


def metrics(args: argparse.Namespace, clock: job.Clock) -> None:
    """A measurement after each step."""
    gradient = torch.ones(20_000)
    kept = dist.new_group() if args.mended else None
    while True:
        time.sleep(COMPUTING)
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
        measured(float(gradient[0]), kept)
        clock.step()


def main() -> None:
    """Train."""
    parser = job.parser(__doc__)
    parser.add_argument("--kind", choices=("halves", "metrics"), default="halves")
    args = parser.parse_args()
    with job.started(args) as clock:
        (halves if args.kind == "halves" else metrics)(args, clock)


if __name__ == "__main__":
    main()
