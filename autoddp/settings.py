"""The settings of a study that the user chooses. They are outside of `study/`, because that imports Optuna."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoddp.knobs import LIMITS, Configuration, Rung


@dataclass(frozen=True)
class StudySettings:
    """The settings of a study; they are the same on all nodes. The defaults are those of the command line."""

    trials: int = 20
    """Largest number of configurations tried: enough for each rung's guesses, and as many again for what these show."""
    all_trials: bool = False
    """Whether all of them are run, also when nothing more is likely to come of them."""
    allow: Rung = Rung.NEAR
    """How much the gradients may be changed: 16 bits usually keep a model's accuracy; low rank may not."""
    accumulate_up_to: int = 1
    """Largest number of the script's steps that may become one. More than 1 changes the batch size, so 1 is default."""
    seed: int = 0
    """The seed of the search, from 0 to 2**32 - 1."""
    diagnose_budget: float | None = None
    """Seconds of steps for finding out why the job is slow; None: a quarter of what the trials may take; 0: none."""
    limits: Mapping[Rung, float] = field(default_factory=lambda: dict(LIMITS))
    """Rung → the largest relative gradient error with which a configuration may be launched."""

    def allows(self, configuration: Configuration) -> bool:
        """Whether the user's options allow launching `configuration`."""
        return configuration.allowed_by(self.allow, self.accumulate_up_to)

    @property
    def allowed(self) -> str:
        """What the user allows, in words."""
        steps = f", up to {self.accumulate_up_to} steps in one" if self.accumulate_up_to > 1 else ""
        return f"{self.allow.value}{steps}"
