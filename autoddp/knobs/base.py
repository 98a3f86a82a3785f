"""What a knob is: one declaration that the search, the worker, the recipe and the report all read."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from autoddp.knobs.job import FirstLook, JobToTune

Value = bool | int | float | str | tuple[float, ...]
Setting = Mapping[str, Value]
"""Names of knobs → values: a part of a configuration that is tried as one."""
Candidate = Value | Setting
"""A value of a knob, or a setting that has values for others too."""
T = TypeVar("T", bool, int, float, str, tuple[float, ...])


class Rung(str, enum.Enum):
    """How far a setting may change training. Ordered: each rung allows all before it.

    The word has nothing to do with the rungs of ASHA and other pruners, which are amounts of resources.
    """

    EXACT = "exact"
    """Same mathematics; only the order of float additions may differ. Example: `bucket_cap_mb`."""
    NEAR = "near"
    """Gradients lose precision on the wire. Example: `hook = "bf16"`."""
    LOSSY = "lossy"
    """Gradients lose rank, with error feedback. Example: `hook = "powersgd"`."""
    BATCH = "batch"
    """The effective batch grows; the gradients of it stand on one of the rungs before. Example: `accumulate_steps`."""

    @property
    def order(self) -> int:
        """0 for exact, 1 for near, and so on."""
        return list(Rung).index(self)

    def allows(self, other: Rung) -> bool:
        """Whether a user who allows this rung allows `other`."""
        return other.order <= self.order

    @property
    def changes(self) -> str:
        """What this rung changes in training, for people."""
        return _FACTS[self].changes

    @property
    def limit(self) -> float | None:
        """The largest gradient error with which it is launched, if the user sets no other; None: it has no error."""
        return _FACTS[self].limit

    @property
    def has_error_feedback(self) -> bool:
        """Whether later steps send what one step left out: the error is then that of a sum over some steps."""
        return _FACTS[self].has_error_feedback


@dataclass(frozen=True)
class _RungFacts:
    changes: str
    limit: float | None = None
    has_error_feedback: bool = False


_FACTS = {
    Rung.EXACT: _RungFacts("nothing but the order of additions"),
    # Rounding to bfloat16 errs by 0.2 to 0.5 %, to float16 by a tenth of that. Four times bfloat16's own error means
    # that values have left the format's range: gradients so small that float16 makes zeros of them.
    Rung.NEAR: _RungFacts("gradients travel in 16 bits", limit=0.02),
    # One step says little, because later steps send what it leaves out, on top of their own. What counts is whether
    # it arrives: at 0.95 a tenth of the sum's energy has (1 - 0.95²), and the optimizer steps by older gradients.
    Rung.LOSSY: _RungFacts(
        "gradients travel as low-rank factors, the error fed back", limit=0.95, has_error_feedback=True
    ),
    Rung.BATCH: _RungFacts("several steps become one: a larger batch, fewer updates"),
}

GRADIENT_RUNGS = tuple(rung for rung in Rung if rung is not Rung.BATCH)
"""How far the gradients themselves may be changed: what `--allow` chooses from."""
LIMITS: Mapping[Rung, float] = {rung: rung.limit for rung in Rung if rung.limit is not None}
"""Rung → the largest relative gradient error; above it a configuration is refused. The user may set others."""


class Reach(enum.Enum):
    """How a knob's value reaches the training process."""

    DDP = "an argument of DistributedDataParallel's constructor"
    HOOK = "the communication hook"
    PROCESS = "the running process: the worker turns it between two steps"
    START = "the environment of a new process: another value needs another start of the script"


class Phase(enum.Enum):
    """When a study tries a knob's candidates."""

    FIRST = "one after another, before the search: they weigh on all other knobs, and may gain without any reduction"
    SEARCH = "together with the others, chosen by Optuna"
    LAST = "on top of the best of the search"


def nothing(_job: JobToTune) -> Sequence[Candidate]:
    """`candidates` for a knob that is never tried by itself."""
    return ()


def always(_look: FirstLook) -> str:
    """`why_not` for a knob that every job can have."""
    return ""


@dataclass(frozen=True)
class Knob(Generic[T]):
    """One setting, whole: whoever needs anything about it finds it here.

    THREADS.of(configuration)     # its value there, None where it stays as the script wrote it
    """

    name: str
    says: str
    """What it does, in one line, for whoever reads a recipe."""
    check: Callable[[Any], str | None]
    """None for a good value, else the rule that the value breaks."""
    reach: Reach
    rung: Rung | Callable[[Any], Rung] = Rung.EXACT
    """The rung of its values, or a function of the value where they stand on several (`hook`)."""
    phase: Phase = Phase.SEARCH
    candidates: Callable[[JobToTune], Sequence[Candidate]] = nothing
    """What is worth trying in a job beside the script's own value, the most promising first."""
    why_not: Callable[[FirstLook], str] = always
    """Why this job cannot have it, from what the first steps have shown; "" if it can."""
    option: str = ""
    """The command line's option without which it is not tried."""
    needs: tuple[str, Value] | None = None
    """`("hook", "powersgd")`: the knob means something only beside that value."""
    required: bool = False
    """Whether it must have a value wherever what it `needs` is there."""
    excludes: str = ""
    """The knob that must not stand beside it: the search chooses one of the two, or neither."""
    replaces: tuple[str, ...] = ()
    """Knobs that are left as written where the search tries this one."""
    could_part_ranks: bool = False
    """Whether a fault of ours in it could make the ranks' parameters differ: then a real job compares them."""
    variable: str = ""
    """The environment variable that sets it at a process's start: the launched job gets it that way."""
    on_the_link: bool = False
    """Whether it steers how bytes travel, and nothing else: then a communication benchmark can judge it."""

    def of(self, configuration: Mapping[str, Value]) -> T | None:
        """The knob's value in `configuration`; None where it has none."""
        return cast("T | None", configuration.get(self.name))

    def settings(self, job: JobToTune) -> list[Setting]:
        """What is worth trying in this job, see `candidates`."""
        return [self.setting(candidate) for candidate in self.candidates(job)]

    def setting(self, candidate: Candidate) -> Setting:
        """A candidate with the names of its knobs."""
        return candidate if isinstance(candidate, Mapping) else {self.name: candidate}

    def rung_of(self, value: Any) -> Rung:
        """The rung on which `value` stands."""
        return self.rung if isinstance(self.rung, Rung) else self.rung(value)


AnyKnob = Knob[Any]


def boolean(value: Any) -> str | None:
    """`check` for a switch."""
    return None if isinstance(value, bool) else "must be true or false"


def number_between(low: float, high: float, unit: str = "") -> Callable[[Any], str | None]:
    """`check` for a number in [low, high]."""

    def check(value: Any) -> str | None:
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
        return None if good else f"must be a number from {low:g} to {high:g}{unit and ' ' + unit}"

    return check


def whole_number_between(low: int, high: int) -> Callable[[Any], str | None]:
    """`check` for an int in [low, high]."""

    def check(value: Any) -> str | None:
        good = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        return None if good else f"must be a whole number from {low} to {high}"

    return check


def one_of(*values: str) -> Callable[[Any], str | None]:
    """`check` for a choice of words."""

    def check(value: Any) -> str | None:
        return None if value in values else "must be one of " + ", ".join(f'"{v}"' for v in values)

    return check
