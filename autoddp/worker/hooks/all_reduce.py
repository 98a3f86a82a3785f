"""How hooks begin an all-reduce."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

AllReduce = Callable[[torch.Tensor, dist.ProcessGroup], dist.Work]


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin the sum over the group's ranks, in place."""
    work: dist.Work = dist.all_reduce(tensor, group=group, async_op=True)
    return work
