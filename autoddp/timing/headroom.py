"""How much of a step would go if gradients travelled for nothing, with an interval like every gain."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autoddp.timing.samples import Block, median
from autoddp.timing.speedup import speedup

_INTERRUPTED = 10.0  # times the median: the script has evaluated or saved meanwhile
_NOTHING = 0.005  # of a step: what is printed as 0 %


@dataclass(frozen=True)
class Headroom:
    """Shares of the step as written, 0.0 to 1.0."""

    share: float
    low: float
    """The 99 % interval, from here …"""
    high: float
    """… to here."""

    def __str__(self) -> str:
        if self.low < _NOTHING:
            return f"up to {self.high:.0%}"
        low, share, high = (f"{part:.0%}" for part in (self.low, self.share, self.high))
        return share if low == share == high else f"{share} ({low} to {high})"


def headroom(as_written: Sequence[Block], without: Sequence[Block]) -> Headroom:
    """The headroom by two or more rounds: index i of both was measured side by side, the second without reduction.

    >>> str(headroom([Block((1.0,)), Block((1.02,))], [Block((0.5,)), Block((0.51,))]))
    '50% (43% to 56%)'

    Without reduction the ranks run free, while a step that waits for gradients, however fast they travel, takes as long
    as its slowest rank: so what counts is each step's maximum over the ranks, and not a mean over them. It is the mean
    over steps and not the median, since ranks that are slow in turn cost time in some steps only. Steps in which the
    script has evaluated or saved are left out.
    """
    gain = speedup(_means([block.seconds for block in as_written]), _means([block.slowest for block in without]))
    low, share, high = (min(1.0, max(0.0, 1 - 1 / ratio)) for ratio in (gain.low, gain.ratio, gain.high))
    return Headroom(share, low, high)


def _means(blocks: Sequence[Sequence[float]]) -> list[float]:
    limit = _INTERRUPTED * median([second for seconds in blocks for second in seconds])
    kept = ([second for second in seconds if second <= limit] or [min(seconds)] for seconds in blocks)
    return [statistics.fmean(seconds) for seconds in kept]
