"""Which reductions of the ranks belong together, and whether the ranks' clocks agree with the order of events.

No rank can have the sum of a reduction before the last rank has given its part. A reduction that seems to end earlier
is a contradiction: the clocks of two ranks differ by at least that much more than was allowed for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from autoddp.timing.timeline import Bucket, Timeline


@dataclass(frozen=True)
class Part:
    """One rank's part of a reduction."""

    rank: int
    bucket: Bucket
    launched: float
    """Seconds on the clock of rank 0."""
    ended: float
    """Seconds on the clock of rank 0."""


@dataclass(frozen=True)
class Reduction:
    """One reduction on all ranks."""

    step: int
    number: int
    """Position among the reductions of its step."""
    parts: tuple[Part, ...]

    @property
    def last(self) -> Part:
        """The part that was launched last: no rank can be done before."""
        return max(self.parts, key=lambda part: part.launched)

    @property
    def too_early(self) -> float:
        """Seconds by which a rank seems to be done before the last one has launched; 0 where none does."""
        return max(0.0, self.last.launched - min(part.ended for part in self.parts))


def step_of(timeline: Timeline, seconds: float) -> int:
    """The step in which the moment lies; what comes after the last step's end belongs to the last step."""
    return min(bisect_left(timeline.steps, seconds), max(0, len(timeline.steps) - 1))


def reductions_of(timelines: Sequence[Timeline]) -> tuple[list[Reduction], int]:
    """The reductions that all ranks made, and the number of steps in which the ranks' reductions do not match.

    All ranks launch their reductions in one order, so the n-th of a step is the same on all of them.
    """
    by_step: dict[int, dict[int, list[Part]]] = defaultdict(lambda: {one.rank: [] for one in timelines})
    for one in timelines:
        for bucket in sorted(one.buckets, key=lambda bucket: bucket.launched):
            part = Part(one.rank, bucket, one.began + bucket.launched, one.began + bucket.ended)
            by_step[step_of(one, bucket.launched)][one.rank].append(part)
    found, unmatched = [], 0
    for step, of_ranks in sorted(by_step.items()):
        if len({len(parts) for parts in of_ranks.values()}) > 1:
            unmatched += 1
            continue
        together = zip(*of_ranks.values(), strict=True)
        found += [Reduction(step, number, parts) for number, parts in enumerate(together)]
    return found, unmatched


@dataclass(frozen=True)
class Order:
    """How well the clocks of the ranks agree with the order of the reductions; as a text, one sentence."""

    reductions: int
    """Seen on all ranks."""
    unmatched: int
    """Steps in which the ranks launched different numbers of reductions, which are not compared."""
    contradictions: int
    """Reductions that seem to end on a rank before the last rank has launched them."""
    worst: float
    """Seconds, of the largest contradiction."""
    error: float
    """Seconds by which the clocks of two ranks may differ."""
    why_none: str = ""
    """Why no reductions were recorded."""

    def __str__(self) -> str:
        if not self.reductions:
            return f"No reductions were recorded{': ' if self.why_none else ''}{self.why_none}."
        error = f"the clocks of two ranks differ by at most {_ms(self.error)}"
        if not self.contradictions:
            told = f"No rank ends one of the {self.reductions} reductions before the last rank launches it; {error}."
        else:
            known = "which that explains" if self.worst <= self.error else "so they differ by more"
            told = (
                f"{self.contradictions} of {self.reductions} reductions seem to end on a rank before the last rank "
                f"launches them, by up to {_ms(self.worst)}: {error}, {known}."
            )
        if self.unmatched:
            told += f" In {self.unmatched} more steps the ranks launched different numbers of reductions."
        return told


def order_of(timelines: Sequence[Timeline]) -> Order:
    """The order of the timelines' reductions, on the clock of rank 0."""
    found, unmatched = reductions_of(timelines)
    early = [seconds for one in found if (seconds := one.too_early) > 0]
    errors = sorted((one.error for one in timelines), reverse=True)
    why = next((one.no_buckets for one in timelines if one.no_buckets), "")
    return Order(len(found), unmatched, len(early), max(early, default=0.0), sum(errors[:2]), why)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
