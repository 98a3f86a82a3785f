"""Heats: those whose steps cost next to nothing beside the baseline's run against each other before the finals.

Such steps are mostly computing, and noisy: a trial of a second may be off by a quarter. But ten of them are cheaper
than one step of the baseline's, so all that a trial could not clearly tell from the best are measured in turn, and the
slowest go home after a while. In turn with the baseline, seconds apart, they would tell who had the better moment.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoddp.knobs import Configuration
from autoddp.study.budget import Pace
from autoddp.study.cost import Ledger
from autoddp.study.measure import TrialFailed
from autoddp.timing import Block

_NOISE = 1.3  # times the best trial: further off than moments make it
_MOST = 6  # contenders: a heat of more would take longer than the finals it is to spare
_ROUNDS = 10  # enough that the faster half of them, by which they are ranked, is five
_BLOCK_SECONDS = 0.5  # that a contender's turn may take even where the baseline's step is shorter
_STAY_AFTER = {3: 3, 5: 2}  # rounds → how many run on


@dataclass(frozen=True)
class Heat:
    """Each contender's blocks, one of each round it was in; whoever failed is absent."""

    rounds: Mapping[Configuration, Sequence[Block]]

    @property
    def ranked(self) -> list[Configuration]:
        """Those who came furthest first; of them the fastest by the faster half of their rounds.

        A moment in which somebody else uses the machine only ever adds time, to one contender and not to the next.
        """

        def place(configuration: Configuration) -> tuple[int, float]:
            seconds = sorted(block.median for block in self.rounds[configuration])
            return -len(seconds), statistics.fmean(seconds[: (len(seconds) + 1) // 2])

        return sorted(self.rounds, key=place)


def contenders(
    ranked: Sequence[Configuration], seconds: Mapping[Configuration, float], pace: Pace
) -> dict[Configuration, float]:
    """Of the usable ones of a rung, the fastest first, those that a heat should decide between; empty for none."""
    near = [c for c in ranked if seconds[c] <= seconds[ranked[0]] * _NOISE and pace.cheap(seconds[c])]
    found = {c: seconds[c] for c in near[:_MOST]}
    # Long steps are the link's, and hardly noisy: what a heat of them would tell is not worth its time.
    affordable = all(_block_seconds(c, s, pace) <= max(_BLOCK_SECONDS, pace.step / 2) for c, s in found.items())
    return found if len(found) > 1 and affordable else {}


def _block_seconds(configuration: Configuration, seconds: float, pace: Pace) -> float:
    return sum(pace.heat(configuration, seconds)) * seconds * configuration.steps_per_update


def run_heat(ledger: Ledger, pace: Pace, seconds: Mapping[Configuration, float], shuffle: random.Random) -> Heat:
    """Contender → its seconds per step in its trial: all of them measured in turn, each round in a new order."""
    rounds: dict[Configuration, list[Block]] = {configuration: [] for configuration in seconds}
    running = list(rounds)
    for number in range(1, _ROUNDS + 1):
        for configuration in shuffle.sample(running, len(running)):
            try:
                rounds[configuration].append(
                    ledger.block(configuration, *pace.heat(configuration, seconds[configuration]))
                )
            except TrialFailed:
                del rounds[configuration]  # it ran in its trial and fails now: not to be launched
        running = [configuration for configuration in running if configuration in rounds]
        if number in _STAY_AFTER:
            running = [c for c in Heat(rounds).ranked if c in running][: _STAY_AFTER[number]]
    return Heat(rounds)
