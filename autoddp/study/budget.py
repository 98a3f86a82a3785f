"""How many steps to spend: enough for a tight interval on fast steps, as few as possible on slow ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoddp.knobs import AS_WRITTEN, Configuration, Rung
from autoddp.knobs.ddp_arguments import STATIC_GRAPH

FINALISTS = 2
"""Of each rung, at most."""
FEWEST_ROUNDS = 3
"""Rounds of the finals on which a decision may rest."""
_BLOCK_SECONDS = 0.05  # of a block: short, because many short rounds pair better than few long ones
_GAINER_SECONDS = 0.4  # of a block of steps that gain clearly, see `gains`: a longer one evens out computing's noise
_SEMIFINAL_SECONDS = 0.2  # of a turn in a semifinal; there each contender has several
_SETTLING = 0.35  # seconds after a turn in which steps far below the baseline's still get faster: caches, TCP windows
_MOST = 20  # steps of a block or of a warm-up at most: the steps of a block share their moment, more tell little more
_FAST = 0.05  # seconds per step below which another step to warm up, or another round, costs next to nothing
_SLOW = 0.3  # seconds per step from which every single step is counted
_GAINS = 0.5  # of the baseline's step, see `gains`
_CHEAP = 0.25  # of the baseline's step, see `cheap`
# Rounds of the finals, by how long a step takes. The 99 % interval of a speed-up is then 2.1, 1.6 or 1.2 times the
# rounds' spread to either side (Student's t), so each further round tells less.
_ROUNDS, _ROUNDS_OF_FAST, _ROUNDS_OF_SLOW = 6, 8, 5
# Rounds for the headroom. Four give an interval of three times their spread; two give a wide one, but on slow steps
# the headroom is mostly so large that it says enough.
_HEADROOM_ROUNDS, _HEADROOM_ROUNDS_OF_SLOW = 4, 2
_MORE_HEADROOM_ROUNDS = 3  # times as many, at most, where the answer decides whether trials are run at all
# Steps of a block, at least: three, so that the median does not feel one in which the script saved or evaluated.
_FEWEST, _FEWEST_OF_SLOW = 3, 2
_FEWEST_IN_SEMIFINALS = 3  # steps to warm up and to time in a semifinal; they cost next to nothing there
_SHORTEST = 1e-6  # seconds; no step is shorter, and nothing is divided by zero


@dataclass(frozen=True)
class StepBudget:
    """`step` is the baseline's seconds per step."""

    step: float

    @property
    def slow(self) -> bool:
        """Whether a step takes so long that the link, not noise, decides its time."""
        return self.step >= _SLOW

    def warmup_of(self, configuration: Configuration, seconds: float | None = None) -> int:
        """Steps to let pass after a turn, never fewer than it takes DDP to rebuild its buckets in gradient-ready order.

        That is one; with static_graph two, the first of which reduces only at the end of backward. `seconds` per step,
        where they are known, tell whether more cost nothing.
        """
        least = 2 if STATIC_GRAPH.of(configuration) else 1
        least = least if self.slow else max(least, 2 if self.step >= _FAST else 3)
        return max(least, self.settling(seconds)) if seconds else least

    def settling(self, seconds: float) -> int:
        """Steps until a step that long takes what it will take; none where waiting for it is dear."""
        return min(_MOST, math.ceil(_SETTLING / seconds)) if self.cheap(seconds) else 0

    def final_rounds(self, turns_are_dear: bool = False) -> int:
        """Rounds of the finals: each measures every finalist and the baseline once. Many short ones pair better."""
        if self.slow or turns_are_dear:
            return _ROUNDS_OF_SLOW
        return _ROUNDS if self.step >= _FAST else _ROUNDS_OF_FAST

    def trial(self) -> float:
        """About the seconds of a trial that is no faster than the baseline."""
        return (self.warmup_of(AS_WRITTEN) + 2 * self.block(self.step)) * self.step

    def final_block(self, seconds: float, at_once: int = 1) -> int:
        """As `block`, in the finals. Of slow steps as many as take one of the baseline's: five rounds tell enough."""
        return max(1, round(self.step / seconds)) if seconds >= _SLOW else self.block(seconds, at_once)

    def round_of(self, configuration: Configuration, seconds: float) -> float:
        """Seconds that a configuration takes in one round of the finals, at `seconds` per step."""
        at_once = configuration.steps_per_update
        steps = self.warmup_of(configuration, seconds) + self.final_block(seconds, at_once)
        return steps * seconds * at_once

    def semifinal(self, configuration: Configuration, seconds: float) -> tuple[int, int]:
        """Steps to warm up and to time in a semifinal: between steps that are alike, little has to settle."""
        counted = _SEMIFINAL_SECONDS / (seconds * configuration.steps_per_update)
        warmup = max(_FEWEST_IN_SEMIFINALS, self.warmup_of(configuration))
        return warmup, max(_FEWEST_IN_SEMIFINALS, min(_MOST, math.ceil(counted)))

    @property
    def headroom_rounds(self) -> int:
        """How often reduction is switched off and on again for the headroom."""
        return _HEADROOM_ROUNDS_OF_SLOW if self.slow else _HEADROOM_ROUNDS

    @property
    def most_headroom_rounds(self) -> int:
        """Rounds at most, where it is not sure whether there is anything to win."""
        return _MORE_HEADROOM_ROUNDS * self.headroom_rounds

    def compared(self, rung: Rung) -> int:
        """Steps on which a hook is compared with the exact mean; on a slow link each costs a whole exact reduction.

        Error feedback shows over several only.
        """
        if rung.has_error_feedback:
            return 2 if self.slow else 4
        return 1 if self.slow else 2

    def block(self, seconds: float, at_once: int = 1) -> int:
        """How many times to time `at_once` steps, in a block for a configuration that takes `seconds` per step."""
        fewest = _FEWEST_OF_SLOW if seconds >= _SLOW else _FEWEST
        spend = max(_GAINER_SECONDS, self.step / 2) if self.gains(seconds) else _BLOCK_SECONDS
        return max(fewest, min(_MOST, math.ceil(spend / max(seconds * at_once, _SHORTEST))))

    def gains(self, seconds: float) -> bool:
        """Whether a step is so much shorter than the baseline's that more of them cost nothing beside it.

        Such steps are mostly computing, whose noise the baseline's hardly feel.
        """
        return seconds < self.step * _GAINS

    def cheap(self, seconds: float) -> bool:
        """Whether even many steps that long cost next to nothing beside the baseline's."""
        return seconds < self.step * _CHEAP
