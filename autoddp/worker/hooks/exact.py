"""The exact mean of a bucket over the ranks, as DDP computes it without a hook."""

# DDP reads a hook's annotations and wants its own types there: no `from __future__ import annotations`.
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from autoddp.worker.hooks.all_reduce import all_reduce, when_reduced
from autoddp.worker.hooks.bucket import GradBucket


def exact_mean(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Start the all-reduce of `bucket`, in place, and return the future of its mean, as a hook must return it.

    DDP multiplies by the inverse, which for three ranks gives other last bits than a division.
    """
    work = all_reduce(bucket.buffer().mul_(1 / group.size()), group)
    return when_reduced(work, lambda mean: mean)


def exact_until(
    ready: Callable[[], bool], hook: Callable[..., torch.futures.Future[torch.Tensor]], group: dist.ProcessGroup
) -> Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]:
    """A hook that calls `hook` where `ready()`, and else makes the exact mean."""

    def either(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hook(state, bucket) if ready() else exact_mean(group, bucket)

    return either
