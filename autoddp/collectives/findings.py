"""What a diagnosis of a script's own communication says, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from autoddp.collectives.recording import Recording
from autoddp.collectives.steps import Steps
from autoddp.collectives.table import Row

WORTHWHILE = 0.03
"""Share of a step below which nothing is a finding."""


@dataclass(frozen=True)
class Finding:
    """One cause, and what a step would gain without it. Times in seconds of a step."""

    cause: str
    ranks: tuple[int, ...]
    seconds: float
    low: float | None
    """Lower end of the 99 % interval; None where nothing was done again."""
    high: float | None
    status: Literal["proved", "suspected"]
    text: str
    fix: str
    lines: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """For JSON, in milliseconds, as a finding of a job with DDP."""
        return {
            "cause": self.cause,
            "ranks": list(self.ranks),
            "ms": _ms(self.seconds),
            "low": None if self.low is None else _ms(self.low),
            "high": None if self.high is None else _ms(self.high),
            "status": self.status,
            "text": self.text,
            "fix": self.fix,
            "lines": list(self.lines),
        }


@dataclass(frozen=True)
class CommunicationDiagnosis:
    """All that was found of a script that communicates by itself."""

    steps: Steps
    recording: Recording
    rows: Sequence[Row]
    findings: Sequence[Finding]
    """What is proved first, in order of price."""
    not_measured: Sequence[str]
    verdict: Sequence[str]
    """The answer, at most three lines."""
    replayed: str = ""
    """How the steps as written compare when they are done again, as a sentence without a period."""

    def plain(self) -> dict[str, Any]:
        """For JSON, under `communication`."""
        return {
            "unit": self.steps.unit,
            "steps_by": self.steps.how,
            "seconds": round(self.recording.seconds, 3),
            "world": self.recording.world,
            "rows": [row.plain() for row in self.rows],
            "processes": [
                {
                    "rank": one.rank,
                    "pid": one.pid,
                    "host": one.host,
                    "started_by": "autoddp" if one.is_launched else "the script",
                    "seconds": round(one.seconds, 3),
                    "calls": one.made,
                    "threads": one.threads,
                    "cores": one.cores,
                    "waited_for_core_seconds": round(one.look.waited_of_thread + one.look.waited_of_helpers, 4),
                    "cpu_seconds": round(one.look.cpu_of_process, 4),
                }
                for one in self.recording.of_rank.values()
            ],
            "replayed": self.replayed,
        }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)
