"""torch's bucket type, which torch's stubs do not export. DDP compares a hook's annotations with it."""

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

__all__ = ["GradBucket", "gradients_in"]


def gradients_in(bucket: GradBucket) -> list[torch.Tensor]:
    """The bucket's gradients in the order in which they lie in it; those of complex parameters as real numbers.

    DDP's buckets are real. For complex parameters, `bucket.gradients()` of torch 2.13 gives only half of the bucket.
    """
    gradients: list[torch.Tensor] = bucket.gradients()
    buffer = bucket.buffer()
    if sum(gradient.numel() for gradient in gradients) == buffer.numel():
        return gradients
    reals = [torch.view_as_real(p) if p.is_complex() else p for p in map(torch.Tensor.detach, bucket.parameters())]
    if sum(p.numel() for p in reals) != buffer.numel():
        return [buffer]
    parts = buffer.split([p.numel() for p in reals])
    return [part.view(len(p), -1) if p.dim() > 1 and p.numel() else part for part, p in zip(parts, reals, strict=True)]
