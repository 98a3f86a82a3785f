"""The hosts have a fast network and a slow one, and the job takes the slow one.

    torchrun --nnodes 2 ... slow_link.py --slow eth0 --fast eth1

Mended: `GLOO_SOCKET_IFNAME` names the fast one.
"""

from __future__ import annotations

import os

import job
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

WIDTH = {"small": 320, "large": 640}  # of the first layer's two sides: 0.4 and 1.6 MB


def main() -> None:
    """Train."""
    parser = job.parser(__doc__)
    parser.add_argument("--slow", default="eth0", metavar="INTERFACE")
    parser.add_argument("--fast", default="eth1", metavar="INTERFACE")
    args = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = args.fast if args.mended else args.slow
    with job.started(args) as clock:
        width = WIDTH[args.size]
        model = DDP(nn.Sequential(nn.Linear(width, width), job.network(width, milliseconds=100, width=32)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        inputs, targets = torch.randn(8, width), torch.arange(8)
        while True:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            clock.step()


if __name__ == "__main__":
    main()
