"""Step samples: seconds per step, kept whole, summed up by the median."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_DOUBT = 0.01  # the chance that the true median lies outside the interval: 99 % sure, as speed-ups are


def median(values: Sequence[float]) -> float:
    """The middle value; ValueError when there is none."""
    if not values:
        raise ValueError("the median of no values")
    return statistics.median(values)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Two of the values with the true median between them, 99 % sure whatever the distribution (the sign test).

    >>> median_interval([3.0, 1.0, 2.0, 5.0, 4.0, 6.0, 8.0, 7.0])
    (1.0, 8.0)

    Fewer than 8 values cannot be 99 % sure: then it is their whole range (94 % for five). ValueError for none.
    """
    if not values:
        raise ValueError("the interval of no values")
    ordered, count = sorted(values), len(values)
    outside, left_out = 2.0 ** (1 - count), 0  # the chance that the median lies outside what is kept
    while True:
        outside += 2 * math.comb(count, left_out + 1) / 2**count
        if outside > _DOUBT:
            return ordered[left_out], ordered[count - 1 - left_out]
        left_out += 1


@dataclass(frozen=True)
class Block:
    """Consecutive steps measured under one configuration, after its warm-up.

    A script may evaluate, log or save between steps; such steps stay in the record, and the median does not feel them.
    """

    seconds: tuple[float, ...]
    """Seconds of each step, the mean over ranks."""
    of_slowest: tuple[float, ...] = ()
    """Seconds that each step took on the rank that was slowest in it; empty where nobody has kept them."""

    @property
    def slowest(self) -> tuple[float, ...]:
        """`of_slowest`, or the mean over ranks where these are not known."""
        return self.of_slowest or self.seconds

    @property
    def median(self) -> float:
        """Seconds of a typical step."""
        return median(self.seconds)
