"""A first guess from what `autoddp bench` has measured: the bucket cap under which a step should be shortest."""

from __future__ import annotations

import math

from autoddp.bench import LinkModel
from autoddp.knobs.ddp_arguments import caps
from autoddp.units import MIB

_ALIKE = 6  # decimals of seconds: caps whose steps differ by less than a microsecond are as good as each other
_BACKWARD = 2 / 3  # of a step's computing: the forward pass takes half as long


def first_cap(link: LinkModel, gradient_bytes: int, computing: float, share: float = 1.0) -> float:
    """MiB. `computing` is the seconds of a step without any reduction; `share` of each byte travels.

    Gradients become ready evenly over the backward pass and buckets travel one after another: a bucket waits for its
    gradients and for the link. Of caps that are as good the largest, which needs the fewest calls.
    """
    mib = gradient_bytes / MIB
    expected = {cap: _seconds(link, math.ceil(mib / cap), gradient_bytes * share, computing) for cap in caps(mib)}
    return min(expected, key=lambda cap: (round(expected[cap], _ALIKE), -cap))


def _seconds(link: LinkModel, buckets: int, sent: float, computing: float) -> float:
    """From the start of the backward pass to the arrival of the last of so many equal buckets."""
    free = 0.0
    for number in range(1, buckets + 1):
        ready = number / buckets * computing * _BACKWARD
        free = max(free, ready) + link.seconds(sent / buckets)
    return free
