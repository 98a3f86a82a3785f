"""A network is trained without DDP, and one rank comes late to the mean of the gradients.

    torchrun --nproc-per-node 4 waiting_for_rank.py --kind work    # rank 2 has more to compute
    torchrun --nproc-per-node 2 waiting_for_rank.py --kind log     # rank 0 describes all parameters after each step

Mended: as much to compute as the others have; without it. --size changes nothing.
"""

from __future__ import annotations

import json
import os

import job
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    """Train."""
    parser = job.parser(__doc__)
    parser.add_argument("--kind", choices=("work", "log"), default="work")
    args = parser.parse_args()
    with job.started(args) as clock, open(os.devnull, "w") as file:
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
