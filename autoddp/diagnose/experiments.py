"""What is done to a running job to prove a cause: one kind of experiment each, and how the job runs meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoddp.codec import replace
from autoddp.diagnose.evidence import Evidence
from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.wire import AS_IT_IS, Delay, Experiment


@dataclass(frozen=True)
class Condition:
    """How the job runs in one block: what an experiment compares."""

    configuration: Configuration = AS_WRITTEN
    experiment: Experiment = AS_IT_IS
    reduce: bool = True

    @property
    def without_additions(self) -> Condition:
        """The condition without what needs no time to settle: what is only added to each step, and turns."""
        plain = replace(self.experiment, delay=None, added_bytes=0, by_turns=0.0)
        return Condition(self.configuration, plain, self.reduce)

    def with_(self, other: Condition) -> Condition:
        """Both together."""
        mine, theirs = self.experiment, other.experiment
        sizes, memory = mine.sizes or theirs.sizes, theirs.memory or mine.memory
        together = replace(
            mine,
            kept_batches=tuple(sorted({*mine.kept_batches, *theirs.kept_batches})),
            loader_workers=0 if sizes or memory else mine.loader_workers or theirs.loader_workers,
            sizes=sizes,
            memory=memory,
            late_values=mine.late_values or theirs.late_values,
            ddp_arguments={**mine.ddp_arguments, **theirs.ddp_arguments},
            threads=theirs.threads or mine.threads,
        )
        configuration = Configuration({**self.configuration, **other.configuration})
        return Condition(configuration, together, self.reduce and other.reduce)


@dataclass(frozen=True)
class Mend:
    """The cause can be taken away for a block."""

    mended: Condition
    against: Condition = Condition()
    even: bool = False
    """Whether all ranks are also given batches of like size in each step; which sizes is known when they are kept."""


@dataclass(frozen=True)
class Probe:
    """The cause cannot be taken away. A delay in its place shows whether all ranks wait for it."""

    delay: Delay
    gain: Callable[[Evidence], float]
    """Seconds that a usual step would gain if the delayed rank needed no more than the others."""


@dataclass(frozen=True)
class Dose:
    """Bytes are added to what the ranks reduce: what they cost is the rate of the link under this job."""

    bytes: int


@dataclass(frozen=True)
class Repeat:
    """Each rank is given one batch again and again: does the cause stay, or was it in the data?

    If it stays, one rank at a time makes its steps, while the others stand still: do the ranks share something?
    """

    ranks: tuple[int, ...]
    """All ranks that read batches; empty where not all do, and nothing can be repeated."""


@dataclass(frozen=True)
class Events:
    """The cause is at work in some steps only: they are compared with their neighbours."""

    is_event: Callable[[Evidence, int], bool]
    others: Callable[[Evidence, int], float] = lambda of, step: 0.0
    """Seconds of such a step for which another cause is at work in it."""
