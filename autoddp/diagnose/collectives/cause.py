"""What each cause of slow communication is: when it is suspected, what is changed to price it, and what mends it.

class Moon(Cause):
    in_words = "the moon"

    def suspect(self, job):
        yield Suspicion(self.name, "the moon is full", fix="wait for a week", changed=job.script.changed(no_moon))

CAUSE = Moon()

Such a file in `causes/` is a cause; nothing else has to know it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autoddp.diagnose.collectives.program import Script
from autoddp.diagnose.collectives.recording import Recording
from autoddp.diagnose.collectives.steps import Steps
from autoddp.diagnose.collectives.table import Row
from autoddp.units import percent


@dataclass(frozen=True)
class Job:
    """All that was seen of a script's communication."""

    recording: Recording
    steps: Steps
    rows: Sequence[Row]
    script: Script | None
    """What can be done again; None if nothing can."""
    cores: int
    """CPU cores that the ranks of this host share."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Interface → Gbit/s to the next host, of those that reach all hosts; empty on one host."""

    @cached_property
    def step(self) -> float:
        """Seconds of a step."""
        return self.steps.seconds

    def times(self, calls: float) -> str:
        """The words for what is called so many times in a step: "2.0 times in each step"."""
        if self.steps.unit == "call":
            return f"in {percent(min(1.0, calls))} of all calls"
        return f"{calls:.1f} times in each {self.steps.unit}"


@dataclass(frozen=True)
class Suspicion:
    """A cause that may be at work."""

    cause: str
    seen: str
    """What was seen, as a sentence without a period."""
    fix: str
    """The lines to change."""
    ranks: tuple[int, ...] = ()
    guess: float = 0.0
    """Seconds of a step that it takes at most, where it is not proved."""
    least: float = 0.0
    """Seconds of a step that mending it saves at least, as the script itself has shown."""
    is_bounded: bool = True
    """Whether mending it can give no more than `guess`; not where the ranks compute faster then, too."""
    shortens_gaps: bool = False
    """Whether a rank does less between its calls then. Else none saves more than it stands in calls."""
    changed: Script | None = None
    """What is done again without the cause; None: nothing can be."""
    measured: tuple[Sequence[float], Sequence[float]] | None = None
    """Seconds of a step in the running script, as written and changed, in pairs; None where it was not tried there."""
    why_not: str = ""
    """Why there is nothing to try, as a sentence without a period."""
    tried: str = ""
    """What the change was, in words: "one call of all bytes"."""
    beside: tuple[tuple[str, Script], ...] = ()
    """Other changes in words, whose price is told beside that of `changed`."""
    lines: tuple[str, ...] = field(default_factory=tuple)
    """The places that it is about: "train.py:12"."""


class Cause(ABC):
    """One cause. Its name is that of its file."""

    in_words: str
    """The cause for people who do not know our names."""

    @property
    def name(self) -> str:
        """The cause in findings and in JSON."""
        return type(self).__module__.rpartition(".")[2]

    @abstractmethod
    def suspect(self, job: Job) -> Iterator[Suspicion]:
        """What the recording makes suspicious, with the change that would take it away."""
