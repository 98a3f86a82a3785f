"""A network is trained without DDP, and many small calls do what one call could do.

    torchrun --nproc-per-node 2 small_collectives.py --kind gradients    # each parameter's gradient by itself
    torchrun --nproc-per-node 4 small_collectives.py --kind statistics   # rank 0's running statistics, each by itself

Mended: one call, with the tensors copied into one and back. --size changes nothing.
"""

from __future__ import annotations

import job
import torch
import torch.distributed as dist
from torch import nn

STATISTICS = 40


def main() -> None:
    """Train."""
    parser = job.parser(__doc__)
    parser.add_argument("--kind", choices=("gradients", "statistics"), default="gradients")
    args = parser.parse_args()
    with job.started(args) as clock:
        is_deep = args.kind == "gradients"
        network = job.network(64, milliseconds=6, width=64, depth=20 if is_deep else 4)
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
        statistics = [torch.zeros(128) for _ in range(STATISTICS)]
        inputs, targets = torch.randn(8, 64), torch.arange(8)
        while True:
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(inputs), targets).backward()
            if is_deep and not args.mended:
                for parameter in network.parameters():
                    assert parameter.grad is not None
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
            else:
                job.average_gradients(network)
            optimizer.step()
            if not is_deep and args.mended:
                flat = torch.cat(statistics)
                dist.broadcast(flat, 0)
                for one, piece in zip(statistics, flat.chunk(STATISTICS), strict=True):
                    one.copy_(piece)
            elif not is_deep:
                for one in statistics:
                    dist.broadcast(one, 0)
            clock.step()


if __name__ == "__main__":
    main()
