"""How many steps to spend: enough for a tight interval on fast steps, as few as possible on slow ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.knobs.ddp_arguments import STATIC_GRAPH

_BLOCK_SECONDS = 0.05  # length of a block: short, because many short rounds pair better than few long ones
# Length of a block of steps that gain clearly (`gains`), and of the script as written in the finals: longer, to even
# out computing's noise. What is noise in the steps as written is a part of every comparison.
_GAINER_SECONDS = 0.4
_SEMIFINAL_SECONDS = 0.2  # length of one block in a semifinal, in which each contender has several blocks
_SETTLING = 0.35  # seconds for which short steps still get faster after a switch: caches and TCP windows fill
_MOST = 20  # steps of a block or of a warm-up at most: the steps of a block share their moment, more add little
_FAST = 0.05  # seconds per step below which another warm-up step, or another round, costs next to nothing
_SLOW = 0.3  # seconds per step above which every single step is worth saving
_GAINS = 0.5  # of the baseline's step, see `gains`
_CHEAP = 0.25  # of the baseline's step, see `cheap`
# Rounds for the headroom. Four rounds give an interval of three times their spread. Two give a wide one, which is
# mostly enough on slow steps, because their headroom is large. To prove a cause by them takes three.
_HEADROOM_ROUNDS, _HEADROOM_ROUNDS_OF_SLOW, _HEADROOM_ROUNDS_FOR_DIAGNOSIS = 4, 2, 3
_MORE_HEADROOM_ROUNDS = 3  # times as many rounds at most, where the headroom decides whether trials are run at all
# Steps of a block, at least: three, so that one step in which the script saved or evaluated does not move the median.
_FEWEST, _FEWEST_OF_SLOW = 3, 2
_FEWEST_IN_SEMIFINALS = 3  # steps to time in a semifinal
_LEAST_WARMUP_IN_SEMIFINALS = 2  # DDP sorts its buckets anew in the first one
_RECORDED, _RECORDED_OF_SLOW = 6, 2
_SHORTEST = 1e-6  # seconds; steps are taken for at least that long, to avoid a division by zero


@dataclass(frozen=True)
class StepBudget:
    """Chooses numbers of steps and rounds. `step` is the baseline's time per step in seconds."""

    step: float

    @property
    def slow(self) -> bool:
        """Whether steps are so long that the link decides their time and noise hardly matters."""
        return self.step >= _SLOW

    def warmup_of(self, configuration: Configuration, seconds: float | None = None) -> int:
        """Number of warm-up steps after a switch to `configuration`.

        It is never less than DDP needs to rebuild its buckets in gradient-ready order: one step, or two with
        static_graph, whose first step reduces only at the end of backward. If `seconds` per step are given and such
        steps are cheap, more of them are added.
        """
        least = 2 if STATIC_GRAPH.of(configuration) else 1
        least = least if self.slow else max(least, 2 if self.step >= _FAST else 3)
        return max(least, self.settling(seconds)) if seconds else least

    def settling(self, seconds: float) -> int:
        """Number of steps of `seconds` each until their time has settled; 0 where such steps are expensive."""
        return self.until_settled(seconds) if self.cheap(seconds) else 0

    def until_settled(self, seconds: float) -> int:
        """Number of steps of `seconds` each until their time has settled, for steps that gain; 0 for others.

        A trial that gains must not be found too slow by its first steps.
        """
        return min(_MOST, math.ceil(_SETTLING / seconds)) if self.gains(seconds) else 0

    def trial(self) -> float:
        """Approximate seconds of a trial that is no faster than the baseline."""
        return (self.warmup_of(AS_WRITTEN) + (1 if self.slow else 2) * self.block(self.step)) * self.step

    def final_block(self, seconds: float, at_once: int = 1) -> int:
        """Number of measurements in a block of the finals; of slow steps, as many as take one baseline step's time."""
        return max(1, round(self.step / seconds)) if seconds >= _SLOW else self.block(seconds, at_once)

    def turn(self, configuration: Configuration, seconds: float) -> tuple[int, int]:
        """Steps to warm up and to time in one round of the finals, at `seconds` per step."""
        steps = self.final_block(seconds, configuration.steps_per_update)
        if configuration == AS_WRITTEN and not self.slow:
            steps = max(steps, min(_MOST, math.ceil(_GAINER_SECONDS / max(seconds, _SHORTEST))))
        return self.warmup_of(configuration, seconds), steps

    def round_of(self, configuration: Configuration, seconds: float) -> float:
        """Seconds that a configuration takes in one round of the finals, with its warm-up, at `seconds` per step."""
        return sum(self.turn(configuration, seconds)) * seconds * configuration.steps_per_update

    def semifinal(self, configuration: Configuration, seconds: float) -> tuple[int, int]:
        """Number of steps to warm up and to time in a semifinal; contenders are alike, so little has to settle."""
        counted = _SEMIFINAL_SECONDS / (seconds * configuration.steps_per_update)
        warmup = max(_LEAST_WARMUP_IN_SEMIFINALS, self.warmup_of(configuration))
        return warmup, max(_FEWEST_IN_SEMIFINALS, min(_MOST, math.ceil(counted)))

    @property
    def recorded(self) -> int:
        """Number of steps whose gradients and buckets are recorded for predictions."""
        return _RECORDED_OF_SLOW if self.slow else _RECORDED

    def headroom_rounds(self, diagnoses: bool = False) -> int:
        """How many times reduction is switched off and on again to measure the headroom."""
        of_slow = _HEADROOM_ROUNDS_FOR_DIAGNOSIS if diagnoses else _HEADROOM_ROUNDS_OF_SLOW
        return of_slow if self.slow else _HEADROOM_ROUNDS

    @property
    def most_headroom_rounds(self) -> int:
        """Largest number of headroom rounds, used while it is uncertain whether there is anything to win."""
        return _MORE_HEADROOM_ROUNDS * self.headroom_rounds()

    @property
    def compared(self) -> int:
        """Number of steps on which a hook is compared with the exact mean.

        Few on a slow link, because each costs a whole exact reduction. More than one, because the gradient of a very
        small parameter may by chance be next to nothing in one step, and what a hook feeds back shows over several.
        """
        return 2 if self.slow else 4

    def block(self, seconds: float, at_once: int = 1) -> int:
        """Number of measurements in a block, each of `at_once` steps of the script, at `seconds` per step."""
        fewest = _FEWEST_OF_SLOW if seconds >= _SLOW else _FEWEST
        spend = max(_GAINER_SECONDS, self.step / 2) if self.gains(seconds) else _BLOCK_SECONDS
        return max(fewest, min(_MOST, math.ceil(spend / max(seconds * at_once, _SHORTEST))))

    def gains(self, seconds: float) -> bool:
        """Whether a step is so much shorter than the baseline's that additional steps cost almost nothing.

        Such steps are mostly computing, and noise of computing weighs more in them than in the baseline's steps.
        """
        return seconds < self.step * _GAINS

    def cheap(self, seconds: float) -> bool:
        """Whether even many steps of `seconds` cost next to nothing beside one of the baseline's."""
        return seconds < self.step * _CHEAP
