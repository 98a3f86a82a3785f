"""Is B faster than A, by how much, how sure: paired rounds on a logarithmic scale, with Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Two-sided quantiles of Student's t for 99 %, by degrees of freedom; a table because one number is not worth SciPy.
# 99 and not 95: a study asks it of five finalists or so, and wants to be wrong about any of them once in twenty.
_T99 = (63.66, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.106, 3.055, 3.012, 2.977, 2.947)
# The smallest spread that is believed of a set of rounds (log scale): two rounds that agree by luck prove nothing.
_FLOOR = 0.003


@dataclass(frozen=True)
class Speedup:
    """How many times faster, with the 99 % interval; 1.0 is the same speed."""

    ratio: float
    low: float
    high: float

    @property
    def sure(self) -> bool:
        """Whether even the lower end is a gain."""
        return self.low > 1.0

    def __str__(self) -> str:
        return f"×{self.ratio:.3g} ({self.low:.3g} to {self.high:.3g})"


def speedup(before: Sequence[float], after: Sequence[float]) -> Speedup:
    """The speed-up of `after` over `before`: seconds per step, one value a round, index i measured side by side.

    >>> str(speedup([1.00, 1.02, 0.98], [0.50, 0.51, 0.49]))
    '×2 (1.97 to 2.03)'

    ValueError for fewer than two rounds or lists of different length: there is no interval then.
    """
    if len(before) != len(after) or len(before) < 2:
        raise ValueError(f"an interval needs two or more paired rounds, got {len(before)} and {len(after)}")
    logs = [math.log(b / a) for b, a in zip(before, after, strict=True)]
    middle = statistics.fmean(logs)
    spread = max(statistics.stdev(logs), _FLOOR)
    degrees = min(len(logs) - 1, len(_T99))
    half = _T99[degrees - 1] * spread / math.sqrt(len(logs))
    return Speedup(math.exp(middle), math.exp(middle - half), math.exp(middle + half))
