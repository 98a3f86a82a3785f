"""Is B faster than A, by how much, how sure: paired rounds on a logarithmic scale, with Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Two-sided quantiles of Student's t for 95 %, by degrees of freedom; a table because one number is not worth SciPy.
_T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
# The smallest spread that is believed of a set of rounds (log scale): two rounds that agree by luck prove nothing.
_FLOOR = 0.003


@dataclass(frozen=True)
class Speedup:
    """How many times faster, with the 95 % interval; 1.0 is the same speed."""

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
    '×2 (1.99 to 2.01)'

    ValueError for fewer than two rounds or lists of different length: there is no interval then.
    """
    if len(before) != len(after) or len(before) < 2:
        raise ValueError(f"an interval needs two or more paired rounds, got {len(before)} and {len(after)}")
    logs = [math.log(b / a) for b, a in zip(before, after, strict=True)]
    middle = statistics.fmean(logs)
    spread = max(statistics.stdev(logs), _FLOOR)
    degrees = min(len(logs) - 1, len(_T95))
    half = _T95[degrees - 1] * spread / math.sqrt(len(logs))
    return Speedup(math.exp(middle), math.exp(middle - half), math.exp(middle + half))
