"""How much longer one side takes than the other, in seconds, from paired rounds, with an interval by Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autoddp.timing.speedup import t99


@dataclass(frozen=True)
class Difference:
    """Seconds, with the 99 % interval. Positive: the first side takes longer."""

    seconds: float
    low: float
    high: float

    @property
    def sure(self) -> bool:
        """Whether even the lower end is above zero."""
        return self.low > 0

    def times(self, factor: float) -> Difference:
        """All three, multiplied by a positive number."""
        return Difference(self.seconds * factor, self.low * factor, self.high * factor)


def difference(before: Sequence[float], after: Sequence[float]) -> Difference:
    """`before` minus `after`; both have one value of seconds for each round.

    >>> found = difference([3.0, 3.1, 2.9, 3.0], [2.0, 2.0, 2.0, 2.0])
    >>> f"{found.seconds:.2f} ({found.low:.2f} to {found.high:.2f})"
    '1.00 (0.76 to 1.24)'

    ValueError for fewer than two rounds, which give no interval, and for lists of different length.
    """
    if len(before) != len(after) or len(before) < 2:
        raise ValueError(f"an interval needs two or more paired rounds, got {len(before)} and {len(after)}")
    found = [b - a for b, a in zip(before, after, strict=True)]
    middle = statistics.fmean(found)
    half = t99(len(found)) * statistics.stdev(found) / math.sqrt(len(found))
    return Difference(middle, middle - half, middle + half)
