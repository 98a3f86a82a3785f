"""The all-reduces with which the short benchmark of start settings imitates a training step."""

from __future__ import annotations

from dataclasses import dataclass

from autoddp.units import MIB

_MOST_BYTES = 64 * MIB  # larger bursts give the same answer, and take seconds on a slow link
_LARGEST_BUCKET = 25 * MIB  # DDP's own
_FEWEST_BUCKETS = 4  # in flight at once: with fewer, several networks or channels would have nothing to share
_LEAST_BYTES = 4096  # of gradients: what is smaller takes one latency all the same


@dataclass(frozen=True)
class Burst:
    """`buckets` all-reduces of `bucket_bytes` each, float32, all in flight at once."""

    backend: str
    buckets: int
    bucket_bytes: int

    @classmethod
    def of_step(cls, gradient_bytes: int, backend: str) -> Burst:
        """The burst that stands for a step with so many bytes of gradients; a smaller one if they are many.

        >>> Burst.of_step(40_000_000, "gloo")
        Burst(backend='gloo', buckets=4, bucket_bytes=10000000)
        """
        sent = max(_LEAST_BYTES, min(gradient_bytes, _MOST_BYTES))
        bucket = min(_LARGEST_BUCKET, sent // _FEWEST_BUCKETS)
        return cls(backend, round(sent / bucket), bucket // 4 * 4)
