"""Of the benchmarks of diagnoses: one diagnosis beside the truth, and the real gain that its price is compared with."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from common import gain

FIRST, PRICE = 0.95, 0.15
"""Targets: the share of the runs with the right cause first, and how far a price may be off."""


@dataclass
class Priced:
    """One diagnosis of a job. Times are in milliseconds of a step."""

    case: str
    cause: str
    """The finding that is right; "" for none."""
    run: int
    first: str = ""
    """The cause that the diagnosis names first."""
    status: str = ""
    """Of the right cause, wherever it stands."""
    ms: float | None = None
    low: float | None = None
    high: float | None = None
    real: float | None = None
    real_low: float | None = None
    real_high: float | None = None
    step_ms: float | None = None
    error: str = ""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Of a step, in the rounds of whole jobs."""
    diagnosis: dict[str, Any] = field(default_factory=dict)

    def take_diagnosis(self, diagnosis: dict[str, Any]) -> dict[str, Any] | None:
        """Fill in what the diagnosis says; its finding of the right cause."""
        self.diagnosis, findings = diagnosis, diagnosis["findings"]
        self.first = findings[0]["cause"] if findings else ""
        ours: dict[str, Any] | None = next((one for one in findings if one["cause"] == self.cause), None)
        if ours is not None:
            self.status, self.ms, self.low, self.high = (ours[name] for name in ("status", "ms", "low", "high"))
        return ours

    def take_seconds(self, seconds: dict[str, list[float]]) -> None:
        """Fill in the real gain; `seconds` of a step "as written" and "mended"."""
        before, ratio = statistics.fmean(seconds["as written"]), gain(seconds["as written"], seconds["mended"])
        self.seconds, self.step_ms = seconds, before * 1e3
        ends = [1e3 * before * (1 - 1 / one) if one else None for one in (ratio.ratio, ratio.low, ratio.high)]
        self.real, self.real_low, self.real_high = ends

    @property
    def ratio(self) -> float | None:
        """The price in the diagnosis, as a multiple of the real gain."""
        return self.ms / self.real if self.ms is not None and self.real else None

    @property
    def cells(self) -> tuple[str, str, str]:
        """Price, gain and their ratio, for a table."""
        gained = number(self.real, self.real_low, self.real_high)
        return number(self.ms, self.low, self.high), gained, "" if self.ratio is None else f"{self.ratio:.2f}"


def number(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """Milliseconds, with their interval."""
    if value is None:
        return ""
    return f"{value:.2f}" + (f" ({low:.2f} to {high:.2f})" if low is not None and high is not None else "")
