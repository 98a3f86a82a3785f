"""A measurement is hung when for a while no step has ended and no rank's main thread has moved."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from autoddp.launch.waiting import Movement
from autoddp.wire import Measure

_FIRST = 300.0  # seconds for the first block, whose step time is unknown
_COMPILING = 180.0  # seconds for which a rank may wait for its compilers
_TIMES = 5  # as long as the same steps take with the baseline: a trial so slow is of no use, and may well be hung
_LEAST = 20.0  # seconds without a sign of life before a trial is called hung


@dataclass
class HangTimeout:
    """How long one measurement may go without a sign of life, and whether it has.

    `is_over` has to be asked several times in a measurement: movement is what has changed since the last look.
    """

    step_seconds: float = 0.0
    """Of the baseline; 0.0 until it is known."""
    compiles: bool = False
    """Whether the step may hold a compilation, which runs in other processes."""
    clock: Callable[[], float] = time.monotonic
    _movement: Movement = field(default_factory=Movement)

    def attempt_begins(self, heartbeats: Path) -> None:
        """`heartbeats` is the folder that the ranks' files will be in, see `worker.heartbeat`."""
        self._movement = Movement(heartbeats, self.clock)

    def of(self, order: Measure) -> float:
        """Seconds without a sign of life that this order may take."""
        if not self.step_seconds:
            return _FIRST
        counted = order.warmup + order.steps + 2 * order.compare + 4 * order.timeline
        return max(_COMPILING if self.compiles else _LEAST, _TIMES * counted * order.at_once * self.step_seconds)

    def is_over(self, began: float, seconds: float) -> bool:
        """Whether nothing has happened for that long; `began` as the clock gives it."""
        return self.clock() - max([began, *self._movement.look().values()]) >= seconds
