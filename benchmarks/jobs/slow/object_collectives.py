"""Python objects travel in each step, where a tensor would do.

    torchrun --nproc-per-node 2 object_collectives.py --kind gather      # each rank's measurements, as a dictionary
    torchrun --nproc-per-node 4 object_collectives.py --kind broadcast   # what rank 0 has decided for this step

Mended: the same numbers in a tensor. --size changes nothing.
"""

from __future__ import annotations

from typing import Any

import job
import torch
import torch.distributed as dist
from torch import nn


def gathered(loss: float, hits: int, as_tensor: bool) -> float:
    """The mean loss of all ranks."""
    world = dist.get_world_size()
    if as_tensor:
        everyone = torch.empty(world, 2)
        dist.all_gather_into_tensor(everyone, torch.tensor([[loss, hits]], dtype=torch.float32))
        return float(everyone[:, 0].mean())
    found: list[Any] = [None] * world
    dist.all_gather_object(found, {"loss": loss, "hits": hits, "rank": dist.get_rank()})
    return float(sum(one["loss"] for one in found) / world)


def decided(step: int, as_tensor: bool) -> float:
    """The learning rate of this step, as rank 0 has it."""
    if as_tensor:
        rate = torch.tensor([1e-3 / (1 + step)])
        dist.broadcast(rate, 0)
        return float(rate)
    plan = [{"rate": 1e-3 / (1 + step), "stop": False} if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(plan, 0)
    assert plan[0] is not None
    return float(plan[0]["rate"])


def main() -> None:
    """Train."""
    parser = job.parser(__doc__)
    parser.add_argument("--kind", choices=("gather", "broadcast"), default="gather")
    args = parser.parse_args()
    with job.started(args) as clock:
        network = job.network(64, milliseconds=3, width=32)
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
        inputs, targets = torch.randn(8, 64), torch.arange(8)
        step = 0
        while True:
            if args.kind == "broadcast":
                optimizer.param_groups[0]["lr"] = decided(step, args.mended)
            optimizer.zero_grad()
            scores = network(inputs)
            loss = nn.functional.cross_entropy(scores, targets)
            loss.backward()
            optimizer.step()
            if args.kind == "gather":
                gathered(float(loss), int((scores.argmax(1) == targets).sum()), args.mended)
            step += 1
            clock.step()


if __name__ == "__main__":
    main()
