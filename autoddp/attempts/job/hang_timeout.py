"""A measurement hangs when for a while every rank that still runs has done nothing but wait for another one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from autoddp.attempts.rank_states import Ranks, places
from autoddp.units import duration
from autoddp.wire import Measure

_FIRST = 300.0  # seconds for the first block, whose step time is unknown
_COMPILING = 180.0  # seconds for which a rank may wait for its compilers
_TIMES = 5  # as long as the same steps take with the baseline: a reduction over a slow link may take a while
_LEAST = 20.0  # seconds of waiting before a trial is called hung


@dataclass
class HangTimeout:
    """How long the ranks may wait for each other in one measurement, and whether they have waited longer.

    `is_over` has to be asked several times in a measurement: what a rank says counts as long as it is new.
    """

    step_seconds: float = 0.0
    """Seconds of a step of the baseline; 0.0 until it is known."""
    compiles: bool = False
    """Whether the step may hold a compilation, which runs in other processes."""
    clock: Callable[[], float] = time.monotonic
    elsewhere: Callable[[], float] = lambda: math.inf
    """Seconds for which every rank of every other host has only waited."""
    _ranks: Ranks = field(default_factory=Ranks)

    def attempt_begins(self, heartbeats: Path) -> None:
        """`heartbeats` is the folder that the ranks' files will be in, see `rank_states.Ranks`."""
        self._ranks = Ranks(heartbeats, self.clock)

    def of(self, order: Measure) -> float:
        """Seconds for which the ranks may wait for each other under this order."""
        if not self.step_seconds:
            return _FIRST
        counted = order.warmup + order.steps + 2 * order.compare + 4 * order.timeline
        return max(_COMPILING if self.compiles else _LEAST, _TIMES * counted * order.at_once * self.step_seconds)

    def is_over(self, began: float, seconds: float, ended: Collection[int] = ()) -> bool:
        """Whether all have waited that long. `began` as the clock gives it; `ended`: ranks that run no more."""
        waited = min(self.clock() - began, self._ranks.waited(ended))
        return waited >= seconds and self.elsewhere() >= seconds

    def waited(self, ended: Collection[int] = ()) -> float:
        """Seconds for which every rank of this host has only waited for others, except those that have `ended`."""
        return self._ranks.waited(ended)

    def says(self, seconds: float) -> str:
        """What hangs, in words."""
        where = places(self._ranks.look(), self.clock())
        return f"hung: for {duration(seconds)} every rank has waited for another one; {where}"
