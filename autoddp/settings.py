"""What the user asks of a study. Apart from the study itself, which imports Optuna: every command line has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoddp.knobs import LIMITS, Configuration, Rung


@dataclass(frozen=True)
class StudySettings:
    """The same on all nodes. The defaults are those of the command line."""

    trials: int = 20
    """Configurations tried, at most: some for each rung's guesses, and as many again for what follows from them."""
    allow: Rung = Rung.NEAR
    """How far the gradients may be changed: 16 bits keep a model's accuracy, as a rule; low rank need not."""
    accumulate_up_to: int = 1
    """Steps of the script that may become one. More change the batch size, so they have to be asked for."""
    seed: int = 0
    """Of the search, from 0 to 2**32 - 1."""
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
