"""What a knob is: one declaration that the search, the recipe and the report all read."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Value = bool | int | float | str | tuple[float, ...]


class Rung(str, enum.Enum):
    """How far a setting may change training. Ordered: each rung allows all before it."""

    EXACT = "exact"
    """Same mathematics; only the order of float additions may differ. Example: `bucket_cap_mb`."""
    NEAR = "near"
    """Gradients lose precision on the wire. Example: `hook = "bf16"`."""
    LOSSY = "lossy"
    """Gradients lose rank, with error feedback. Example: `hook = "powersgd"`."""
    BATCH = "batch"
    """The effective batch grows; the gradients of it stand on one of the rungs before. Example: `accumulate_steps`."""

    @property
    def height(self) -> int:
        """0 for exact, 1 for near, 2 for lossy, 3 for batch."""
        return list(Rung).index(self)

    def allows(self, other: Rung) -> bool:
        """Whether a user who allows this rung allows `other`."""
        return other.height <= self.height

    @property
    def changes(self) -> str:
        """What this rung changes in training, for people."""
        return _CHANGES[self]


_CHANGES = {
    Rung.EXACT: "nothing but the order of additions",
    Rung.NEAR: "gradients travel in 16 bits",
    Rung.LOSSY: "gradients travel as low-rank factors, the error fed back",
    Rung.BATCH: "several steps become one: a larger batch, fewer updates",
}

GRADIENT_RUNGS = (Rung.EXACT, Rung.NEAR, Rung.LOSSY)
"""How far the gradients themselves may be changed: what `--allow` chooses from."""


@dataclass(frozen=True)
class Knob:
    """One setting. `check` answers None for a good value, else the rule that it breaks."""

    name: str
    says: str
    """One line for whoever reads a recipe."""
    check: Callable[[Any], str | None]
    rung_of: Callable[[Any], Rung]
    """The rung of a value: a knob's values may stand on several (`hook`)."""
    ddp_argument: bool
    """Whether it is an argument of DistributedDataParallel: then it exists where the installed torch has it."""
    needs: tuple[str, Value] | None = None
    """`("hook", "powersgd")`: the knob means something only beside that value."""
    variable: str = ""
    """The environment variable that sets it at a process's start: the launched job gets it that way."""
    start: bool = False
    """Whether only a new process can take another value."""
    on_the_link: bool = False
    """Whether it steers how bytes travel, and nothing else: then a communication benchmark can judge it."""


def exact(_value: Any) -> Rung:
    """`rung_of` for a knob all of whose values are exact."""
    return Rung.EXACT


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
