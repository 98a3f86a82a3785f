"""What is kept back: time and steps for the fewest final rounds that can decide."""

from __future__ import annotations

from collections.abc import Iterable

from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.study.budget import StepBudget
from autoddp.study.cost import Cost
from autoddp.timing import LOOKS

FEWEST_ROUNDS = LOOKS[0]
"""Rounds of the finals that a decision needs, at least."""

Timed = tuple[Configuration, float]
"""A configuration with its seconds per step."""


class Reserve:
    """Tells what final rounds would take, and whether there is time for them."""

    def __init__(self, cost: Cost, budget: StepBudget) -> None:
        self._cost = cost
        self._budget = budget

    def can_pay(self, finalists: Iterable[Timed], seconds: float = 0.0, steps: float = 0.0) -> bool:
        """Whether there is time for the fewest final rounds of these and of the script as written.

        And before them for so many `seconds` and `steps` of something else.
        """
        a_round = [(AS_WRITTEN, self._budget.step), *finalists]
        return self.affords(a_round * FEWEST_ROUNDS, seconds, steps)

    def affords(self, turns: Iterable[Timed], seconds: float = 0.0, steps: float = 0.0) -> bool:
        """Whether there is time for these turns, and before them for so many `seconds` and `steps` of other things."""
        each = list(turns)
        seconds += sum(self._budget.round_of(*one) for one in each)
        return self._cost.affords(seconds, steps + sum(self.steps_of_turn(*one) for one in each))

    def steps_of_turn(self, configuration: Configuration, seconds: float) -> int:
        """Steps of the script that a configuration takes in one final round."""
        return self._cost.steps_of(*self._budget.turn(configuration, seconds), configuration.steps_per_update)
