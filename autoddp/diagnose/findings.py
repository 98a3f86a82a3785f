"""What a diagnosis says: findings with their price, the waterfall, and what N ranks give. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from autoddp.timing import STAGES, RankAnatomy

WORTHWHILE = 0.03
"""Share of a step below which nothing is a finding."""


@dataclass(frozen=True)
class Finding:
    """One cause, and what a step would gain without it. Times in seconds per step."""

    cause: str
    ranks: tuple[int, ...]
    """Ranks on which the cause lies."""
    seconds: float
    low: float | None
    """Lower end of the 99 % interval; None where no experiment was made."""
    high: float | None
    status: Literal["proved", "suspected"]
    text: str
    """What was seen, and how it was proved, or why it was not."""
    fix: str
    """What to change, in the words of the script."""
    lines: tuple[str, ...] = ()
    """Lines of the script that it is about: "train.py:12"."""

    def plain(self) -> dict[str, Any]:
        """For JSON, in milliseconds."""
        return {
            "cause": self.cause,
            "ranks": list(self.ranks),
            "ms": _ms(self.seconds),
            "low": None if self.low is None else _ms(self.low),
            "high": None if self.high is None else _ms(self.high),
            "status": self.status,
            "text": self.text,
            "fix": self.fix,
            **({"lines": list(self.lines)} if self.lines else {}),
        }


@dataclass(frozen=True)
class Level:
    """One level of the waterfall: seconds of a step with this cause mended, and all those before it."""

    cause: str
    seconds: float


@dataclass(frozen=True)
class Scaling:
    """What several ranks give against one."""

    ranks: int
    samples_per_second: float | None
    """Samples per second of all ranks; None where the script's batches are not known."""
    of_one: float | None
    """Samples per second of one rank that computes alone; None where the script's batches are not known."""
    efficiency: float
    """The step of one rank alone, as a share of the step of all: 1.0 is perfect."""
    text: str


@dataclass(frozen=True)
class Diagnosis:
    """All that was found."""

    seconds: float
    """Seconds of a step as written."""
    anatomy: Sequence[RankAnatomy]
    findings: Sequence[Finding]
    """What is proved first, in order of price; what explains a part of another finding stands before that one."""
    waterfall: Sequence[Level]
    """The first level is the script as written."""
    scaling: Scaling
    not_measured: Sequence[str]
    """Sentences."""
    verdict: Sequence[str]
    """At most three lines, and one more where the script's own collectives take much beside DDP's."""
    mended: Sequence[RankAnatomy] = ()
    """A usual step of each rank with all causes mended that can be mended for a block; empty if there are none."""
    spent: float = 0.0
    """Seconds of steps that the diagnosis took."""

    def plain(self) -> dict[str, Any]:
        """The diagnosis as a dictionary for JSON, with times in milliseconds."""
        return {
            "step_ms": _ms(self.seconds),
            "samples_per_second": self.scaling.samples_per_second,
            "ranks": [_rank(one) for one in self.anatomy],
            "findings": [one.plain() for one in self.findings],
            "waterfall": [{"cause": one.cause, "step_ms": _ms(one.seconds)} for one in self.waterfall],
            "mended": [_rank(one) for one in self.mended],
            "scaling": {
                "ranks": self.scaling.ranks,
                "samples_per_second": self.scaling.samples_per_second,
                "of_one": self.scaling.of_one,
                "efficiency": round(self.scaling.efficiency, 4),
                "text": self.scaling.text,
            },
            "not_measured": list(self.not_measured),
            "verdict": list(self.verdict),
            "spent_seconds": round(self.spent, 3),
        }


NOTHING: dict[str, Any] = {
    "step_ms": None,
    "samples_per_second": None,
    "ranks": [],
    "findings": [],
    "waterfall": [],
    "mended": [],
    "scaling": None,
    "not_measured": [],
    "verdict": [],
    "spent_seconds": 0.0,
}
"""What `plain` gives where nothing could be measured."""


def _rank(one: RankAnatomy) -> dict[str, Any]:
    stages = {f"{name}_ms": _ms(one.stages[name]) for name in STAGES}
    return {"rank": one.rank, "host": one.host, "step_ms": _ms(one.step), **stages, "waiting_ms": _ms(one.waiting)}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)
