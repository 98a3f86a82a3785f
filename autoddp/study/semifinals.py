"""Semifinals: configurations whose steps cost next to nothing beside the baseline's are compared before the finals.

Such steps are mostly computing, and noisy: a trial of a second may be off by a quarter. Ten of them cost less than one
step of the baseline, so all configurations that a trial could not clearly tell from the best are measured again,
interleaved, and the slowest drop out after some rounds. Interleaving them with the slow baseline, seconds apart, would
measure the machine's drift instead.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoddp.knobs import Configuration
from autoddp.study.budget import StepBudget
from autoddp.study.cost import Cost
from autoddp.study.measure import TrialFailed
from autoddp.timing import Block

_NOISE = 1.3  # times the best trial: a configuration further off is slower, not unlucky
_MOST = 6  # contenders: a semifinal of more would take longer than the finals
_ROUNDS = 10  # enough that the faster half of them, by which they are ranked, is five
_BLOCK_SECONDS = 0.5  # that a contender's turn may take even where the baseline's step is shorter
_STAY_AFTER = {3: 3, 5: 2}  # rounds → how many run on


@dataclass(frozen=True)
class Semifinal:
    """Each contender's blocks, one for each of its rounds; a configuration that failed is absent."""

    rounds: Mapping[Configuration, Sequence[Block]]

    @property
    def ranked(self) -> list[Configuration]:
        """Those that ran the most rounds first; among these, by the mean of the faster half of their rounds.

        Other work on the machine only adds time, and to one contender more than to the next: hence the faster half.
        """

        def place(configuration: Configuration) -> tuple[int, float]:
            seconds = sorted(block.median for block in self.rounds[configuration])
            return -len(seconds), statistics.fmean(seconds[: (len(seconds) + 1) // 2])

        return sorted(self.rounds, key=place)


def contenders(
    ranked: Sequence[Configuration], seconds: Mapping[Configuration, float], budget: StepBudget
) -> dict[Configuration, float]:
    """Of the usable ones of a rung, the fastest first, those that a semifinal should compare; empty for none."""
    near = [c for c in ranked if seconds[c] <= seconds[ranked[0]] * _NOISE and budget.cheap(seconds[c])]
    found = {c: seconds[c] for c in near[:_MOST]}
    # The link decides long steps, which are hardly noisy: a semifinal of them is not worth its time.
    affordable = all(_block_seconds(c, s, budget) <= max(_BLOCK_SECONDS, budget.step / 2) for c, s in found.items())
    return found if len(found) > 1 and affordable else {}


def _block_seconds(configuration: Configuration, seconds: float, budget: StepBudget) -> float:
    return sum(budget.semifinal(configuration, seconds)) * seconds * configuration.steps_per_update


def run_semifinal(
    cost: Cost, budget: StepBudget, seconds: Mapping[Configuration, float], shuffle: random.Random
) -> Semifinal:
    """Contender → its seconds per step in its trial: all of them measured in turn, each round in a new order."""
    rounds: dict[Configuration, list[Block]] = {configuration: [] for configuration in seconds}
    running = list(rounds)
    for number in range(1, _ROUNDS + 1):
        for configuration in shuffle.sample(running, len(running)):
            try:
                rounds[configuration].append(
                    cost.block(configuration, *budget.semifinal(configuration, seconds[configuration]))
                )
            except TrialFailed:
                del rounds[configuration]  # it ran in its trial and fails now: not to be launched
        running = [configuration for configuration in running if configuration in rounds]
        if number in _STAY_AFTER:
            running = [c for c in Semifinal(rounds).ranked if c in running][: _STAY_AFTER[number]]
    return Semifinal(rounds)
