"""Semifinals: before the finals, configurations with much shorter steps than the baseline's are compared.

Such steps are mostly computing, and noisy: a trial of a second may be off by a quarter. Ten of them cost less than one
step of the baseline. So all configurations that a trial could not clearly tell from the best are measured again,
interleaved, and the slowest drop out after some rounds. Interleaving them with the slow baseline would put seconds
between their blocks and measure the machine's drift instead.
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

_NOISE = 1.3  # times the best trial's seconds: a configuration above that is really slower, not just unlucky
_MOST = 6  # contenders: a semifinal of more would take longer than the finals
_ROUNDS = 5  # contenders are ranked by the faster half of their rounds, which is then three
_BLOCK_SECONDS = 0.5  # a contender's block may take that long even where half a step of the baseline is shorter
_STAY_AFTER = {2: 3, 3: 2}  # number of finished rounds → number of contenders that stay


@dataclass(frozen=True)
class Semifinal:
    """The results of a semifinal; a configuration that failed is absent."""

    contenders: tuple[Configuration, ...]
    blocks: tuple[tuple[Block, ...], ...]
    """Blocks of each contender, one a round."""

    @property
    def rounds(self) -> dict[Configuration, tuple[Block, ...]]:
        """Each contender's blocks."""
        return dict(zip(self.contenders, self.blocks, strict=True))

    @property
    def ranked(self) -> list[Configuration]:
        """The contenders, best first: by the number of rounds that they ran, then by the mean of their faster rounds.

        The faster half of the rounds counts, because other work on the machine only adds time, and adds more to one
        contender than to another.
        """

        rounds = self.rounds

        def place(configuration: Configuration) -> tuple[int, float]:
            seconds = sorted(block.median for block in rounds[configuration])
            return -len(seconds), statistics.fmean(seconds[: (len(seconds) + 1) // 2])

        return sorted(rounds, key=place)


def contenders(
    ranked: Sequence[Configuration], seconds: Mapping[Configuration, float], budget: StepBudget
) -> dict[Configuration, float]:
    """The configurations, with their seconds, that a semifinal should compare; empty if none is worth its time.

    `ranked` has the usable configurations of a rung, the fastest first.
    """
    near = [c for c in ranked if seconds[c] <= seconds[ranked[0]] * _NOISE and budget.cheap(seconds[c])]
    found = {c: seconds[c] for c in near[:_MOST]}
    # The link decides the time of long steps, which are hardly noisy: a semifinal of them is not worth its time.
    affordable = all(_block_seconds(c, s, budget) <= max(_BLOCK_SECONDS, budget.step / 2) for c, s in found.items())
    return found if len(found) > 1 and affordable else {}


def steps_of_semifinal(cost: Cost, budget: StepBudget, seconds: Mapping[Configuration, float]) -> int:
    """Steps of the script that a semifinal of these takes at most."""
    return _ROUNDS * sum(cost.steps_of(*budget.semifinal(c, s), c.steps_per_update) for c, s in seconds.items())


def _block_seconds(configuration: Configuration, seconds: float, budget: StepBudget) -> float:
    return sum(budget.semifinal(configuration, seconds)) * seconds * configuration.steps_per_update


def run_semifinal(
    cost: Cost, budget: StepBudget, seconds: Mapping[Configuration, float], shuffle: random.Random
) -> Semifinal:
    """Measure all contenders in rounds, each round in a new order; `seconds` are those per step in their trials."""
    rounds: dict[Configuration, list[Block]] = {configuration: [] for configuration in seconds}
    running = list(rounds)
    for number in range(1, _ROUNDS + 1):
        for configuration in shuffle.sample(running, len(running)):
            try:
                rounds[configuration].append(
                    cost.block(configuration, *budget.semifinal(configuration, seconds[configuration]))
                )
            except TrialFailed:
                del rounds[configuration]  # a configuration that ran in its trial and fails now must not be launched
        running = [configuration for configuration in running if configuration in rounds]
        if number in _STAY_AFTER:
            running = [c for c in _of(rounds).ranked if c in running][: _STAY_AFTER[number]]
    return _of(rounds)


def _of(rounds: Mapping[Configuration, Sequence[Block]]) -> Semifinal:
    return Semifinal(tuple(rounds), tuple(map(tuple, rounds.values())))
