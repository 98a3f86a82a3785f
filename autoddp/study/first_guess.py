"""A first guess from what `autoddp bench` has measured: the bucket cap under which a step should be shortest."""

from __future__ import annotations

import math

from autoddp.bench import LinkModel
from autoddp.knobs.ddp_arguments import caps
from autoddp.units import MIB

_ALIKE = 6  # decimals of seconds: caps whose steps differ by less than a microsecond count as equal
_BACKWARD = 2 / 3  # the backward pass's share of a step's computing: the forward pass takes half as long


def first_cap(link: LinkModel, gradient_bytes: int, computing: float, share: float = 1.0) -> float:
    """The bucket cap, in MiB, for which the model of the link predicts the shortest step.

    `computing` is the time of a step without any reduction, in seconds; `share` is the part of the bytes that a hook
    sends. The model assumes that gradients become ready evenly over the backward pass and that buckets travel one after
    another: a bucket waits for its gradients and for the link. Of equal caps the largest is taken, because it needs the
    fewest calls.
    """
    mib = gradient_bytes / MIB
    expected = {cap: _seconds(link, math.ceil(mib / cap), gradient_bytes * share, computing) for cap in caps(mib)}
    return min(expected, key=lambda cap: (round(expected[cap], _ALIKE), -cap))


def _seconds(link: LinkModel, buckets: int, sent: float, computing: float) -> float:
    """Seconds from the start of the backward pass to the arrival of the last of `buckets` equal buckets."""
    free = 0.0
    for number in range(1, buckets + 1):
        ready = number / buckets * computing * _BACKWARD
        free = max(free, ready) + link.seconds(sent / buckets)
    return free
