"""Samples of step times: all seconds are kept, and the median sums them up."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_DOUBT = 0.01  # the chance that the true median lies outside the interval: 99 %, as for speed-ups


def median(values: Sequence[float]) -> float:
    """The middle value; ValueError when there is none."""
    if not values:
        raise ValueError("the median of no values")
    return statistics.median(values)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """A 99 % interval of the median, whose ends are two of the values; valid for every distribution (sign test).

    >>> median_interval([3.0, 1.0, 2.0, 5.0, 4.0, 6.0, 8.0, 7.0])
    (1.0, 8.0)

    With fewer than 8 values 99 % cannot be reached. The interval is then their whole range (94 % for five values).
    ValueError if there are no values.
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

    A script may evaluate, log or save between steps. Such steps stay in the record; they hardly move the median.
    """

    seconds: tuple[float, ...]
    """Seconds of each step, as the mean over ranks."""
    of_slowest: tuple[float, ...] = ()
    """Seconds of each step on the rank that was slowest in it; empty where they were not recorded."""

    @property
    def slowest(self) -> tuple[float, ...]:
        """`of_slowest`, or the mean over ranks where that is empty."""
        return self.of_slowest or self.seconds

    @property
    def median(self) -> float:
        """Median seconds of a step."""
        return median(self.seconds)
