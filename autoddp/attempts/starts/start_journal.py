"""Every start of a script without DDP that was measured, one JSON line each: a run that was cut off goes on with them.

The first line says what the script as written has shown, and of what job. Starts can be compared only by as many steps
or numbers as that one had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autoddp.attempts.job.journal import Lines
from autoddp.codec import decode, encode, replace
from autoddp.knobs import Configuration
from autoddp.study import TrialFailed
from autoddp.wire import JobFacts


@dataclass(frozen=True)
class ShownByHost:
    """What the ranks of one host have shown in a start."""

    counts: tuple[tuple[int, int], ...] = ()
    """Each rank with its steps or numbers, see `OneStart.shown`; none where this host's ranks show nothing."""
    period: int | None = None
    """See `StepsMade.period`; None for printed numbers."""


@dataclass(frozen=True)
class Shown:
    """What the first start has shown."""

    hosts: tuple[ShownByHost, ...]
    """One of each host, in their order."""
    facts: JobFacts

    def is_of(self, other: Shown) -> bool:
        """Whether starts of both can be compared. Which settings have a reason to help differs by chance."""
        facts, theirs = (replace(one.facts, start_settings=(), knobs=()) for one in (self, other))
        return (self.hosts, facts) == (other.hosts, theirs)


@dataclass(frozen=True)
class MeasuredStart:
    """One start, and what came of it."""

    configuration: Configuration
    cost: float | None
    """See `Objective`; None where it has failed."""
    failure: str
    seconds: float
    """For which it ran."""

    def result(self) -> float:
        """The cost, or TrialFailed."""
        if self.cost is None:
            raise TrialFailed(self.failure)
        return self.cost


class StartJournal:
    """Append-only; `path` gets a line at once for each start."""

    def __init__(self, path: Path) -> None:
        self._lines = Lines(path)
        self._made = 0
        self._earlier: Sequence[MeasuredStart] = ()

    def begins(self, shown: Shown, earlier: Sequence[MeasuredStart] = ()) -> None:
        """Write the first line. `earlier`: starts that are not made again as long as the study asks for the same."""
        self._earlier = earlier
        self._lines.add(encode(shown))

    def answer(self, configuration: Configuration) -> MeasuredStart | None:
        """What came of this start in the run that was cut off, if it was the next one there."""
        if self._made >= len(self._earlier):
            return None
        earlier = self._earlier[self._made]
        if earlier.configuration != configuration:
            self._earlier = ()  # the study goes another way
            return None
        self.add(earlier)
        return earlier

    def add(self, start: MeasuredStart) -> None:
        """Append."""
        self._made += 1
        self._lines.add(encode(start))


def read_starts(path: Path) -> tuple[Shown, list[MeasuredStart]] | None:
    """What a journal says, up to the first line that cannot be read; None where that is its first one.

    A failure at the end is left out: what has cut the run off may be its cause.
    """
    starts: list[MeasuredStart] = []
    try:
        first, *rest = path.read_text(encoding="utf-8").splitlines() or [""]
        shown = decode(first, Shown)
    except (OSError, ValueError):
        return None
    for line in rest:
        try:
            starts.append(decode(line, MeasuredStart))
        except ValueError:
            break
    return shown, starts[:-1] if starts and starts[-1].cost is None else starts
