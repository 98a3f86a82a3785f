"""Speed-ups from paired rounds, with an interval by Student's t on a logarithmic scale."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autoddp.units import ratio

# Two-sided quantiles of Student's t for 99 %, by degrees of freedom; a table because one number is not worth SciPy.
# 99 % and not 95 %: a study tests about five finalists, and should be wrong about any of them once in twenty studies.
_T99 = (63.66, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.106, 3.055, 3.012, 2.977, 2.947)
# The smallest spread (log scale) that is assumed for a set of rounds: two rounds may agree by luck.
_FLOOR = 0.003
_ANYTHING = 100.0
"""Factor between the ends of an interval from which on they say nothing but that nothing is known."""


@dataclass(frozen=True)
class Speedup:
    """How many times faster one side is than the other, with the 99 % interval; 1.0 is the same speed."""

    ratio: float
    low: float
    high: float

    @property
    def sure(self) -> bool:
        """Whether even the lower end is a gain."""
        return self.low > 1.0

    def __str__(self) -> str:
        if self.high > _ANYTHING * self.low:
            return f"×{ratio(self.ratio)} (may be anything)"
        return f"×{ratio(self.ratio)} ({ratio(self.low)} to {ratio(self.high)})"


def speedup(
    before: Sequence[float], after: Sequence[float], reach: float | None = None, least_spread: float = 0.0
) -> Speedup:
    """The speed-up of `after` over `before`. Both have one value of seconds per step for each round.

    The interval reaches so many standard errors to either side; without `reach` it is the 99 % interval of rounds whose
    number was fixed beforehand. `least_spread`: of the rounds, on a logarithmic scale, where they agree more by luck.

    >>> str(speedup([1.00, 1.02, 0.98], [0.50, 0.51, 0.49]))
    '×2.00 (1.97 to 2.03)'
    >>> str(speedup([1.00, 2.00, 1.00], [0.50, 3.00, 0.50]))
    '×1.39 (may be anything)'

    ValueError for fewer than two rounds, which give no interval, and for lists of different length.
    """
    if len(before) != len(after) or len(before) < 2:
        raise ValueError(f"an interval needs two or more paired rounds, got {len(before)} and {len(after)}")
    logs = [math.log(b / a) for b, a in zip(before, after, strict=True)]
    middle = statistics.fmean(logs)
    spread = max(statistics.stdev(logs), least_spread, _FLOOR)
    half = (t99(len(logs)) if reach is None else reach) * spread / math.sqrt(len(logs))
    return Speedup(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


def unpaired_speedup(before: Sequence[float], after: Sequence[float]) -> Speedup:
    """The speed-up of `after` over `before` in rounds not made in turn: seconds per step, two values or more each.

    The interval is Welch's with the degrees of freedom of the smaller side, which makes it rather too wide.

    >>> str(unpaired_speedup([1.00, 1.02, 0.98], [0.50, 0.51, 0.49, 0.50]))
    '×2.00 (1.74 to 2.30)'

    ValueError for fewer than two values on a side.
    """
    fewest = min(len(before), len(after))
    if fewest < 2:
        raise ValueError(f"an interval needs two or more rounds on each side, got {len(before)} and {len(after)}")
    sides = [[math.log(one) for one in side] for side in (before, after)]
    middle = statistics.fmean(sides[0]) - statistics.fmean(sides[1])
    errors = [max(statistics.stdev(side), _FLOOR) / math.sqrt(len(side)) for side in sides]
    half = t99(fewest) * math.hypot(*errors)
    return Speedup(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


def t99(count: int) -> float:
    """Student's t for a 99 % interval of the mean of `count` values, two or more."""
    return _T99[min(count - 1, len(_T99)) - 1]
