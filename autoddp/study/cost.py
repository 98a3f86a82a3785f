"""Counts what a study spends: steps and wall time, by phase and by purpose."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from autoddp.knobs import Configuration, GradientError
from autoddp.study.measure import Measure
from autoddp.timing import Block
from autoddp.timing.timeline import Timeline
from autoddp.wire import BlockDone, Experiment, Start

_ASSUMED = 30.0  # seconds that tuning may take in any case, see `attempts.job.deadline`
_BLOCKS = 16  # that one start of a short script has room for
_FEWEST = 2  # steps of a block of a short script, and of a warm-up
_MOST_AT_FIRST = 8  # the same, as long as the script may turn out to be short
_FEW = 3  # steps of a block: in fewer, one in which the script evaluates or saves moves the median
_INTERRUPTED = 1.5  # times as long as usual: more than noise, where steps are few because they are long


class Cost:
    """Measures blocks and adds up what they cost.

    `steps` counts steps of the script by purpose; `wall_seconds` adds up seconds by phase and by purpose.
    """

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self.phase = "baseline"
        self.steps: dict[str, int] = defaultdict(int)
        self.compilations = 0
        self.wall_seconds: dict[str, float] = defaultdict(float)
        self._certain, self._spent, self._assumed = math.inf, 0.0, _ASSUMED
        self.start = Start()
        """The start of the script that the last block is from."""
        self.total = 0.0
        """Seconds that all measurements have taken, starts of the script included."""
        self._made = 0
        self.queued = 0
        """Batches that may wait in the queues of the script's loaders, as far as that is known."""

    @property
    def left(self) -> float:
        """Seconds that tuning may still take, by the launcher's clock when it gave the last order.

        Where tuning ends with the script, and nobody knows when, the script is taken to be short at first.
        """
        if not self.start.limits:
            return self._certain
        while self._assumed <= self._spent:
            self._assumed *= 2
        return min(self._certain, self._assumed - self._spent)

    @property
    def left_at_most(self) -> float:
        """Seconds that tuning may still take, however long the script turns out to be."""
        return self._certain

    @property
    def spent(self) -> float:
        """Seconds that tuning has taken, by the same clock."""
        return self._spent

    def take_longer(self, seconds: float = 0.0) -> bool:
        """Take the script to be twice as long, or first so long that so many `seconds` are left, if that is more.

        False where that changes nothing.
        """
        if not self.start.limits or self.left >= self._certain:
            return False
        # Each call adds time. Where a start of the script is long, `seconds` may not be enough for a trial.
        enough = self._spent + seconds
        self._assumed = enough if enough > self._assumed else 2 * self._assumed
        return True

    @property
    def steps_left(self) -> float:
        """Steps of the script in this start, from here on; as many as it has made, where its length is not known.

        Infinite where they are not counted.
        """
        if not self._made:
            return math.inf
        length = self.start.length
        return self._made if length is None else max(0, length - self._made)

    @property
    def steps_of_a_start(self) -> float:
        """Steps that one start of the script gives, as far as that is known; infinite where it is not."""
        usable = self.start.usable
        return math.inf if usable is None else usable

    def affords(self, seconds: float, steps: float) -> bool:
        """Whether there is time for so many steps, and for the starts of the script that they need."""
        missing = steps - self.steps_left
        starts = math.ceil(missing / max(1.0, min(self.steps_of_a_start, self._made))) if missing > 0 else 0
        return self.left > seconds + starts * self.start.seconds

    @property
    def seconds_if_it_ends(self) -> float:
        """Seconds of another start of the script, where this one may end at any step, and tuning not with it."""
        may_end = self._made > 0 and self.start.length is None and not self.start.limits
        return self.start.seconds if may_end else 0.0

    def steps_of(self, warmup: int, steps: int, at_once: int = 1) -> int:
        """Steps of the script that a block of these numbers takes."""
        most = self._most(at_once)
        return (min(warmup, most) + min(steps, most)) * at_once

    def _most(self, at_once: int) -> int:
        """Largest number of steps of a block, and of its warm-up: a short script must have room for many blocks."""
        if not self._made:
            return sys.maxsize
        usable = self.start.usable
        most = max(_MOST_AT_FIRST, self._made // 4) if usable is None else usable // _BLOCKS
        return max(_FEWEST, most // at_once)

    @contextlib.contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Add the wall time of the `with` block to `phase`, which stays the current phase afterwards."""
        self.phase, began = phase, time.perf_counter()
        try:
            yield
        finally:
            self.wall_seconds[phase] += time.perf_counter() - began

    def block(
        self, configuration: Configuration, warmup: int, steps: int, *, reduce: bool = True, apply: bool = True
    ) -> Block:
        """Measure one block of `steps` steps, or fewer where the script is short.

        The time of a failed measurement is counted too.
        """
        most = self._most(configuration.steps_per_update)
        done = self._measured(configuration, min(warmup, most), min(steps, most), reduce, apply)
        return Block(done.seconds, done.slowest)

    def undisturbed(
        self, configuration: Configuration, warmup: int, steps: int, usual: float = math.inf, *, apply: bool = True
    ) -> Block:
        """A block; where the script seems to have evaluated or saved in one of few steps, the same steps once more.

        `usual`: seconds of a step so far, where that is known. What takes as long again was no interruption.
        """
        block = self.block(configuration, warmup, steps, apply=apply)
        if len(block.seconds) >= _FEW or block.median < _INTERRUPTED * min(usual, *block.seconds):
            return block
        return self.block(configuration, 0, len(block.seconds), apply=False)

    def recorded(
        self,
        configuration: Configuration,
        warmup: int,
        steps: int,
        *,
        reduce: bool,
        apply: bool,
        experiment: Experiment,
    ) -> BlockDone:
        """Measure one block and record its stages."""
        return self._measured(configuration, warmup, steps, reduce, apply, anatomy=True, experiment=experiment)

    def timelines(self, configuration: Configuration, steps: int, in_effect: bool = False) -> tuple[Timeline, ...]:
        """Record some steps: when each gradient is ready and each bucket travels, on each rank.

        `in_effect`: whether the configuration is that of the last block.
        """
        return self._measured(configuration, int(not in_effect), 0, True, not in_effect, timeline=steps).timelines

    def compare(self, configuration: Configuration, steps: int) -> GradientError | None:
        """Measure how far the hook of `configuration`, which must be in effect, is from the exact mean."""
        self.steps["compared"] += steps
        return self._measured(configuration, 0, 0, True, False, compare=steps).error

    def _measured(
        self, configuration: Configuration, warmup: int, steps: int, reduce: bool, apply: bool, **more: Any
    ) -> BlockDone:
        began = time.perf_counter()
        try:
            done = self._measure(configuration, warmup, steps, reduce=reduce, apply=apply, **more)
        finally:
            took = time.perf_counter() - began
            self.wall_seconds[self.phase] += took
            self.total += took
        at_once = configuration.steps_per_update
        self.compilations += done.compilations
        self.steps["measured"] += len(done.seconds) * at_once
        self.steps["warm-up"] += warmup * at_once
        self.wall_seconds["measured"] += sum(done.seconds) * at_once
        self.wall_seconds["warm-up"] += done.warmup_seconds
        self.wall_seconds["turns"] += done.apply_seconds
        left = math.inf if done.left is None else done.left
        took = sum(done.seconds) * at_once + done.warmup_seconds + done.apply_seconds
        self.start, self._made = done.start, done.made
        self.queued = max(self.queued, done.queued)
        self._certain, self._spent = left - took, done.start.spent + took
        return done
