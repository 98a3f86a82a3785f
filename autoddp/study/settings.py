"""What the user asked of a study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoddp.knobs import LIMITS, Configuration, Rung

WORTHWHILE = 0.03
"""Headroom below which no trial is run: less can hardly be told from noise."""


@dataclass(frozen=True)
class Plan:
    """The same on all nodes."""

    trials: int = 20
    """Configurations tried, at most: some for each rung's guesses, and as many again for what follows from them."""
    allow: Rung = Rung.NEAR
    accumulate_up_to: int = 1
    """Steps of the script that may become one."""
    seed: int = 0
    limits: Mapping[Rung, float] = field(default_factory=lambda: dict(LIMITS))
    """Rung → the largest relative gradient error with which a configuration may be launched."""

    def allows(self, configuration: Configuration) -> bool:
        """Whether the user would have this launched."""
        return configuration.allowed_by(self.allow, self.accumulate_up_to)

    @property
    def allowed(self) -> str:
        """What the user allows, in words."""
        steps = f", up to {self.accumulate_up_to} steps in one" if self.accumulate_up_to > 1 else ""
        return f"{self.allow.value}{steps}"
