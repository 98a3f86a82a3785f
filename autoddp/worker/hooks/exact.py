"""The exact mean of a bucket over the ranks, as DDP computes it without a hook."""

from __future__ import annotations

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
