"""The script waits for a collective, and reads its result only after it has computed something else.

    torchrun --nproc-per-node 2 blocking_collectives.py --kind gradients  # of one half, before the other's backward
    torchrun --nproc-per-node 2 blocking_collectives.py --kind weights    # of the next layer, before this one computes

Mended: `async_op=True`, and the wait where the result is read. Computing is sleeping; --size changes nothing.
"""

from __future__ import annotations

import argparse
import time

import job
import torch
import torch.distributed as dist

NUMBERS = 2_000_000  # of a gradient, or of a layer's weights
BACKWARD = 0.02  # seconds of one half
LAYER, LAYERS = 0.012, 4  # seconds of a layer


def backward(seconds: float) -> None:
    """Stands for computing that takes no core."""
    time.sleep(seconds)


def averaged(args: argparse.Namespace, clock: job.Clock) -> None:
    """Two halves of a network, with a gradient each."""
    first, second, weights = torch.ones(NUMBERS), torch.ones(NUMBERS // 4), torch.zeros(NUMBERS)
    while True:
        backward(BACKWARD)
        work = dist.all_reduce(first, async_op=args.mended)
        backward(BACKWARD)
        dist.all_reduce(second)
        second /= dist.get_world_size()
        weights[: len(second)] -= 1e-3 * second
        if work is not None:
            work.wait()
        first /= dist.get_world_size()
        weights -= 1e-3 * first
        clock.step()


def gathered(args: argparse.Namespace, clock: job.Clock) -> None:
    """Layers whose weights lie on all ranks in pieces. The weights of the next one are gathered in time."""
    world = dist.get_world_size()
    pieces = [torch.ones(NUMBERS // world) for _ in range(LAYERS)]
    weights, following = torch.zeros(NUMBERS), torch.zeros(NUMBERS)
    activations = torch.ones(64)
    while True:
        for layer in range(LAYERS):
            if args.mended:
                work = dist.all_gather_into_tensor(following, pieces[(layer + 1) % LAYERS], async_op=True)
            else:
                dist.all_gather_into_tensor(following, pieces[(layer + 1) % LAYERS])
            backward(LAYER)
            activations *= weights[:64]
            if args.mended:
                work.wait()
            weights, following = following, weights
        clock.step()


def main() -> None:
    """Train."""
    parser = job.parser(__doc__)
    parser.add_argument("--kind", choices=("gradients", "weights"), default="gradients")
    args = parser.parse_args()
    with job.started(args) as clock:
        (averaged if args.kind == "gradients" else gathered)(args, clock)


if __name__ == "__main__":
    main()
