"""Step samples: seconds per step, kept whole, summed up by the median."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


def median(values: Sequence[float]) -> float:
    """The middle value; ValueError when there is none."""
    if not values:
        raise ValueError("the median of no values")
    return statistics.median(values)


@dataclass(frozen=True)
class Block:
    """Consecutive steps measured under one configuration, after its warm-up.

    A script may evaluate, log or save between steps; such steps stay in the record, and the median does not feel them.
    """

    seconds: tuple[float, ...]
    """Seconds of each step, the mean over ranks."""

    @property
    def median(self) -> float:
        """Seconds of a typical step."""
        return median(self.seconds)
