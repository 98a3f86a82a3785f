"""What the user asked of a study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoddp.knobs import LIMITS, Rung

WORTHWHILE = 0.03
"""Headroom below which no trial is run: less can hardly be told from noise."""


@dataclass(frozen=True)
class Plan:
    """The same on all nodes."""

    trials: int = 20
    allow: Rung = Rung.NEAR
    budget: float = 300.0
    """Seconds of measuring after which no new trial begins."""
    seed: int = 0
    limits: Mapping[Rung, float] = field(default_factory=lambda: dict(LIMITS))
    """Rung → the largest relative gradient error with which a configuration may be launched."""
