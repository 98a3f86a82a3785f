"""The settings of a study that the user chooses. They are outside of `study/`, because that imports Optuna."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autoddp.knobs import LIMITS, Configuration, Rung
from autoddp.units import figure, milliseconds

_STEPS, _REGEX = "steps", "regex"
_FORMS = "must be steps, or regex:min:PATTERN, or regex:max:PATTERN with one group around the number"
_EXAMPLE = "e.g. --objective 'regex:max:samples/s ([0-9.]+)'"


@dataclass(frozen=True)
class Objective:
    """What is made better where a script builds no DDP model: its steps per second, or a number that it prints.

    Objective.parse("steps")
    Objective.parse("regex:min:loss ([0-9.]+)")

    Either way one start of the script gives one *cost*, and the lower cost is the better one. A gain is a ratio of two
    costs, as it is for steps of a DDP job.
    """

    text: str
    """What the user has given."""

    @classmethod
    def parse(cls, text: str) -> Objective:
        """The objective that the text stands for; ValueError with the rule that it breaks, on one line."""
        if text == _STEPS:
            return cls(text)
        if not text.isprintable():
            raise ValueError(f"only printable characters may stand in it, such as \\t for a tab; {_EXAMPLE}")
        kind, _, rest = text.partition(":")
        direction, colon, pattern = rest.partition(":")
        if kind != _REGEX:
            raise ValueError(f"{_FORMS}, {_EXAMPLE}")
        if not colon or direction not in ("min", "max"):
            raise ValueError(f"which is better, a lower number or a higher one? {_FORMS}, {_EXAMPLE}")
        try:
            with warnings.catch_warnings():  # what may mean something else in a later Python is no error in this one
                warnings.simplefilter("ignore")
                groups = re.compile(pattern).groups
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"no regular expression ({error}); {_EXAMPLE}") from None
        if groups != 1:
            count = "no group" if not groups else f"{groups} groups"
            raise ValueError(f"{count}, and it must have exactly one, around the number ((?:…) is none); {_EXAMPLE}")
        return cls(text)

    @property
    def of_steps(self) -> bool:
        """Whether it is the script's steps per second."""
        return self.text == _STEPS

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """The expression that finds the number in a line; for steps it finds nothing."""
        return re.compile("(?!)" if self.of_steps else self.text.split(":", 2)[2])

    @property
    def _higher_is_better(self) -> bool:
        return self.text.startswith(f"{_REGEX}:max:")

    def cost(self, number: float) -> float:
        """What a number costs; ValueError, with the reason, for one of which there is no ratio."""
        if not (math.isfinite(number) and number > 0):
            raise ValueError(f"{number:g}: gains are ratios, so the number must be above 0 and finite")
        cost = 1 / number if self._higher_is_better else number
        if not (math.isfinite(cost) and cost > 0):
            raise ValueError(f"{number:g}: too large or too small to be compared")
        return cost

    def number(self, cost: float) -> float:
        """The inverse of `cost`: seconds of a step, or the number that the script prints."""
        return 1 / cost if self._higher_is_better else cost

    def figure(self, cost: float) -> str:
        """The number as a person reads it, without its `unit`."""
        return milliseconds(cost) if self.of_steps else figure(self.number(cost))

    @property
    def unit(self) -> str:
        """What the number is."""
        return "ms per step" if self.of_steps else "as printed"

    @property
    def better(self) -> str:
        """What a gain is called."""
        return "faster" if self.of_steps else "better"


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
    objective: Objective | None = None
    """What is made better in a script without DDP, by settings that are read when it starts; None: a DDP job's steps
    are."""
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
