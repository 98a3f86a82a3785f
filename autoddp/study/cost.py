"""Counts what a study spends: steps and wall time, by phase and by purpose."""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from autoddp.knobs import Configuration, GradientError
from autoddp.study.measure import Measure
from autoddp.timing import Block
from autoddp.timing.timeline import Timeline
from autoddp.wire import BlockDone, Experiment


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
        self.left = math.inf
        """Seconds that tuning may still take. All nodes have the same number, so they decide alike by it."""

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
        """Measure one block of `steps` steps. The time of a failed measurement is counted too."""
        done = self._measured(configuration, warmup, steps, reduce, apply)
        return Block(done.seconds, done.slowest)

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
        """Measure one block and record its stages, for a diagnosis."""
        self.phase = "diagnosis"
        return self._measured(configuration, warmup, steps, reduce, apply, anatomy=True, experiment=experiment)

    def timelines(self, configuration: Configuration, steps: int) -> tuple[Timeline, ...]:
        """Record some steps: when each gradient is ready and each bucket travels, on each rank."""
        return self._measured(configuration, 1, 0, True, True, timeline=steps).timelines

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
            self.wall_seconds[self.phase] += time.perf_counter() - began
        at_once = configuration.steps_per_update
        self.compilations += done.compilations
        self.steps["measured"] += len(done.seconds) * at_once
        self.steps["warm-up"] += warmup * at_once
        self.wall_seconds["measured"] += sum(done.seconds) * at_once
        self.wall_seconds["warm-up"] += done.warmup_seconds
        self.wall_seconds["turns"] += done.apply_seconds
        left = math.inf if done.left is None else done.left
        self.left = left - sum(done.seconds) * at_once - done.warmup_seconds - done.apply_seconds
        return done
