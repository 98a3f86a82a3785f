"""What a knob is: one declaration that the search, the worker, the recipe and the report all read."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from autoddp.knobs.job import FirstLook, JobToTune

Value = bool | int | float | str | tuple[float, ...]
Setting = Mapping[str, Value]
"""Knob name → value: a part of a configuration that is tried as a whole."""
Candidate = Value | Setting
"""A value of a knob, or a setting that also has values for other knobs."""
T = TypeVar("T", bool, int, float, str, tuple[float, ...])


class Rung(str, enum.Enum):
    """How much a setting may change training. Rungs are ordered: a user who allows one allows all before it.

    These rungs are not those of ASHA and other pruners, which are amounts of resources.
    """

    EXACT = "exact"
    """Same mathematics; only the order of float additions may differ. Example: `bucket_cap_mb`."""
    NEAR = "near"
    """Gradients lose precision on the wire, or ranks no longer share what is no parameter. Example: `hook = "bf16"`."""
    LOSSY = "lossy"
    """Gradients lose rank, with error feedback. Example: `hook = "powersgd"`."""
    BATCH = "batch"
    """The effective batch grows; its gradients are on one of the rungs before. Example: `accumulate_steps`."""

    @property
    def order(self) -> int:
        """0 for exact, 1 for near, and so on."""
        return _ORDER[self]

    def allows(self, other: Rung) -> bool:
        """Whether a user who allows this rung allows `other`."""
        return other.order <= self.order

    @property
    def changes(self) -> str:
        """What this rung changes in training, as text for users; see also `Configuration.changes`."""
        return _FACTS[self].changes

    @property
    def limit(self) -> float | None:
        """The default largest gradient error with which a configuration is launched; None if the rung has no error."""
        return _FACTS[self].limit

    @property
    def has_error_feedback(self) -> bool:
        """Whether later steps send what one step left out. The error that counts is then that of a sum over steps."""
        return _FACTS[self].has_error_feedback


_ORDER = {rung: place for place, rung in enumerate(Rung)}


@dataclass(frozen=True)
class _RungFacts:
    changes: str
    limit: float | None = None
    has_error_feedback: bool = False


_FACTS = {
    Rung.EXACT: _RungFacts("nothing but the order of additions"),
    # Rounding to bfloat16 errs by 0.2 to 0.5 %, to float16 by a tenth of that. Four times bfloat16's own error means
    # that values have left the format's range: float16 rounds very small gradients to zero.
    Rung.NEAR: _RungFacts("gradients travel in 16 bits", limit=0.02),
    # One step says little, because later steps send what it leaves out, in addition to their own gradients. What counts
    # is whether that arrives. At an error of 0.95 only a tenth of the sum's energy has arrived (1 - 0.95²), and the
    # optimizer steps by older gradients.
    Rung.LOSSY: _RungFacts(
        "gradients travel as low-rank factors, the error fed back", limit=0.95, has_error_feedback=True
    ),
    Rung.BATCH: _RungFacts("several steps become one: a larger batch, fewer updates"),
}

GRADIENT_RUNGS = tuple(rung for rung in Rung if rung is not Rung.BATCH)
"""The rungs that say how much the gradients themselves may be changed: the choices of `--allow`."""
LIMITS: Mapping[Rung, float] = {rung: rung.limit for rung in Rung if rung.limit is not None}
"""Rung → default of the largest relative gradient error, above which a configuration is refused."""


class Reach(enum.Enum):
    """How a knob's value reaches the training process."""

    DDP = "an argument of DistributedDataParallel's constructor"
    HOOK = "the communication hook"
    PROCESS = "the running process: the worker sets it between two steps"
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
    """One setting that can be tuned, with everything that search, worker, recipe and report need to know of it.

    THREADS.of(configuration)     # the knob's value there; None where it stays as the script wrote it
    """

    name: str
    says: str
    """What the knob does, in one line, for readers of a recipe."""
    check: Callable[[Any], str | None]
    """Returns None for a good value, else the rule that the value breaks."""
    reach: Reach
    rung: Rung | Callable[[Any], Rung] = Rung.EXACT
    """The rung of all values, or a function from a value to its rung where they differ (`hook`)."""
    phase: Phase = Phase.SEARCH
    candidates: Callable[[JobToTune], Sequence[Candidate]] = nothing
    """Returns what is worth trying in a job, beside the script's own value; the most promising first."""
    why_not: Callable[[FirstLook], str] = always
    """Returns why a job cannot have this knob, judged by its first steps; "" if it can."""
    option: str = ""
    """The option of the command line that must be given for the knob to be tried; "" if none is needed."""
    needs: tuple[str, Value] | None = None
    """`("hook", "powersgd")`: the knob has a meaning only in a configuration with that value."""
    required: bool = False
    """Whether the knob must have a value in every configuration with the value that it `needs`."""
    excludes: str = ""
    """The knob that must not be in the same configuration: the search chooses one of the two, or neither."""
    replaces: tuple[str, ...] = ()
    """Knobs that are left as written where the search tries this one."""
    does: Callable[[Any], str] | None = None
    """Returns what a value does, in a few words for people who do not know the knob's name; see `in_words`."""
    changes: str = ""
    """What the knob changes in training, as text for users, where that is not what its rung says; else ""."""
    could_part_ranks: bool = False
    """Whether the knob could make the ranks' parameters differ, by a bug of autoddp or by how the script uses what the
    knob changes; a real job then compares them."""
    variable: str = ""
    """The environment variable that sets the knob when a process starts; the launched job is given it."""
    on_the_link: bool = False
    """Whether the knob only changes how bytes travel, so that a communication benchmark can judge it."""
    may_lose_data: bool = False
    """Whether some machines lose data under it without an error: only a benchmark that checks sums can tell."""

    def of(self, configuration: Mapping[str, Value]) -> T | None:
        """The knob's value in `configuration`; None if it has none there."""
        return cast("T | None", configuration.get(self.name))

    def in_words(self, value: Value) -> str:
        """What this value does, in a few words; where there are none for it, how it is set."""
        return self.does(value) if self.does else f"{self.variable or self.name}={value}"

    def settings(self, job: JobToTune) -> list[Setting]:
        """The settings worth trying in this job, see `candidates`."""
        return [self.setting(candidate) for candidate in self.candidates(job)]

    def setting(self, candidate: Candidate) -> Setting:
        """The setting that a candidate stands for."""
        return candidate if isinstance(candidate, Mapping) else {self.name: candidate}

    def rung_of(self, value: Any) -> Rung:
        """The rung of `value`."""
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
