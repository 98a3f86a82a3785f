"""Two hosts have a fast network and a slow one, and a script without DDP takes the slow one.

    torchrun --nnodes 2 ... wrong_interface.py --kind gradients   # one all-reduce in each step
    torchrun --nnodes 2 ... wrong_interface.py --kind pieces      # a reduce-scatter and an all-gather

Mended: `GLOO_SOCKET_IFNAME` names the fast one. Computing is sleeping; --size changes nothing.
"""

from __future__ import annotations

import os
import time

import job
import torch
import torch.distributed as dist

NUMBERS = 500_000  # of a gradient
COMPUTING = 0.04  # seconds of a step


def main() -> None:
    """Train."""
    parser = job.parser(__doc__)
    parser.add_argument("--kind", choices=("gradients", "pieces"), default="gradients")
    parser.add_argument("--slow", default="eth0", metavar="INTERFACE")
    parser.add_argument("--fast", default="eth1", metavar="INTERFACE")
    args = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = args.fast if args.mended else args.slow
    with job.started(args) as clock:
        gradient, weights = torch.ones(NUMBERS), torch.zeros(NUMBERS)
        mine = torch.zeros(NUMBERS // dist.get_world_size())
        while True:
            time.sleep(COMPUTING)
            if args.kind == "gradients":
                dist.all_reduce(gradient)
                gradient /= dist.get_world_size()
                weights -= 1e-3 * gradient
            else:
                dist.reduce_scatter_tensor(mine, gradient)
                mine *= -1e-3 / dist.get_world_size()
                dist.all_gather_into_tensor(weights, mine)
                weights.clamp_(-1, 1)
            clock.step()


if __name__ == "__main__":
    main()
