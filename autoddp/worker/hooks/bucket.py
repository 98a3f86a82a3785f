"""torch's bucket type, which torch's stubs do not export. DDP compares a hook's annotations with it."""

from torch.distributed import GradBucket  # type: ignore[attr-defined]

__all__ = ["GradBucket"]
