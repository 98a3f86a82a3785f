"""When is a measurement hung? When for a while no step boundary came and no rank's main thread has moved."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from autoddp.wire import Measure

_FIRST = 300.0  # seconds for the first block, whose step time is unknown
_COMPILING = 180.0  # seconds for which a rank may wait for its compilers
_LEAST = 20.0  # seconds without a sign of life before a trial is called hung


@dataclass
class Patience:
    """`heartbeats` is the folder that the ranks' files are in, see `worker.heartbeat`."""

    heartbeats: Path = Path()
    step_seconds: float = 0.0
    """Of the baseline; 0.0 until it is known."""
    compiles: bool = False
    """Whether the step may hold a compilation, which runs in other processes."""

    def with_(self, order: Measure) -> float:
        """Seconds without a sign of life that this order may take."""
        if not self.step_seconds:
            return _FIRST
        counted = order.warmup + order.steps + 2 * order.compare
        return max(_COMPILING if self.compiles else _LEAST, 5 * counted * order.at_once * self.step_seconds)

    def is_over(self, began: float, seconds: float) -> bool:
        """Whether nothing has happened for that long; `began` as time.time() gives it."""
        beats = [path.stat().st_mtime for path in self.heartbeats.glob("*")]
        return time.time() - max([began, *beats]) >= seconds
