"""When each rank's main thread moved last, by a clock that never jumps, as the system's time may.

    movement = Movement(folder)
    movement.look()              # called repeatedly; {"0": 12.5, "1": 19.0}, seconds of the clock

A rank that moves gives its file a new modification time, see `worker.heartbeat`. Only a change of that time counts: the
file's age would be wrong after each correction of the system's time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path


class Movement:
    """The movement of the ranks whose files are in `heartbeats`; `clock` gives seconds."""

    def __init__(self, heartbeats: Path = Path(), clock: Callable[[], float] = time.monotonic) -> None:
        self._heartbeats = heartbeats
        self._clock = clock
        self._seen: dict[str, tuple[int, float]] = {}

    def look(self) -> dict[str, float]:
        """File name → when it was last seen to have changed; a file that is new has changed."""
        now = self._clock()
        for path in self._heartbeats.glob("*"):
            with contextlib.suppress(OSError):
                stamp = path.stat().st_mtime_ns
                if self._seen.get(path.name, (None, 0.0))[0] != stamp:
                    self._seen[path.name] = (stamp, now)
        return {name: at for name, (_, at) in self._seen.items()}
