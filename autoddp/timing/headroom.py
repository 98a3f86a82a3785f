"""The headroom: the share of a step that would be saved if reducing gradients took no time, with its interval."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autoddp.timing.samples import Block, median
from autoddp.timing.speedup import speedup
from autoddp.units import percent

_INTERRUPTED = 10.0  # times the median: in a longer step the script has evaluated or saved
_NOTHING = 0.005  # share of a step that is printed as 0 %


@dataclass(frozen=True)
class Headroom:
    """The headroom as shares of the step as written, from 0.0 to 1.0, with a 99 % interval."""

    share: float
    low: float
    """Lower end of the 99 % interval."""
    high: float
    """Upper end of the 99 % interval."""
    why_unknown: str = ""
    """Why it was not found out: then it may be anything."""

    def __str__(self) -> str:
        if self.why_unknown:
            return "not known"
        if self.low < _NOTHING:
            return f"up to {percent(self.high)}"
        low, share, high = (percent(part) for part in (self.low, self.share, self.high))
        return share if low == share == high else f"{share} ({low} to {high})"


def headroom(as_written: Sequence[Block], without: Sequence[Block]) -> Headroom:
    """The headroom from two or more rounds with reduction (`as_written`) and without it; index i belongs to round i.

    >>> str(headroom([Block((1.0,)), Block((1.02,))], [Block((0.5,)), Block((0.51,))]))
    '50 % (43 % to 56 %)'

    Without reduction the ranks run free. A step that waits for gradients takes as long as its slowest rank, however
    fast the gradients travel. So the time of a step without reduction is its maximum over the ranks, not their mean.
    Steps are summed up by their mean, not their median, because ranks that are slow alternately cost time in some steps
    only. Steps in which the script has evaluated or saved are left out.

    Where steps without reduction take longer, something else has made them longer, and may have hidden as much again.

    ValueError for fewer than two rounds.
    """
    gain = speedup(_means([block.seconds for block in as_written]), _means([block.slowest for block in without]))
    low, share, high = (min(1.0, 1 - 1 / ratio) for ratio in (gain.low, gain.ratio, gain.high))
    return Headroom(max(0.0, share), max(0.0, low), min(1.0, max(0.0, high, -share)))


def _means(blocks: Sequence[Sequence[float]]) -> list[float]:
    limit = _INTERRUPTED * median([second for seconds in blocks for second in seconds])
    kept = ([second for second in seconds if second <= limit] or [min(seconds)] for seconds in blocks)
    return [statistics.fmean(seconds) for seconds in kept]
