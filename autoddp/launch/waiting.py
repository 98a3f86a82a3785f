"""Whether ranks move: when each one's main thread moved last, and lines for the user where an attempt takes long.

An attempt in which no rank has moved for half an hour before its first measurement is ended.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autoddp.units import duration

_FIRST_WORD = 30.0  # seconds until the first line
_NEXT_WORD = 60.0  # seconds from one line to the next: a long start must not fill the terminal
_STILL = 5.0  # seconds without a movement before a line says so; a rank's file is touched about every second
_GIVEN_UP = 1800.0  # seconds without a movement of any rank; the usual time limit of torch's collectives


class Movement:
    """When each rank's main thread moved last, by a clock that never jumps, as the system's time may.

        movement = Movement(folder)
        movement.look()              # called repeatedly; {"0": 12.5, "1": 19.0}, seconds of the clock

    A rank that moves gives its file in `heartbeats` a new modification time, see `worker.heartbeat`. Only a change of
    that time counts: the file's age would be wrong after each correction of the system's time.
    """

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


@dataclass
class Waiting:
    """Watches one attempt. `heartbeats` is the folder of the ranks' files, see `worker.heartbeat`."""

    heartbeats: Path
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    activity: str = "tuning"
    """See `Options.activity`."""

    def __post_init__(self) -> None:
        self._began = self.clock()
        self._due = self._began + _FIRST_WORD
        self._movement = Movement(self.heartbeats, self.clock)
        self._measuring = 0.0
        self._next_word = _FIRST_WORD

    def look(self) -> str:
        """Call this repeatedly until the attempt can measure: why the attempt must be ended, or ""."""
        now = self.clock()
        ranks = self._ranks()
        unmoved = self._unmoved(ranks, now)
        if not unmoved and now > self._due:
            self._due = now + _NEXT_WORD
            self.say(f"waiting for the first steps, {duration(now - self._began)}: {self._where(ranks, now)}")
        return unmoved

    def look_in_silence(self) -> str:
        """As `look`, without lines for the user."""
        return self._unmoved(self._ranks(), self.clock())

    def measuring(self, seconds: float, left: float | None) -> None:
        """Call this repeatedly while the study waits for a measurement: for how long it has, and still may in all."""
        if seconds < self._measuring:
            self._next_word = _FIRST_WORD
        self._measuring = seconds
        if seconds > self._next_word:
            self._next_word = seconds + _NEXT_WORD
            limit = "" if left is None else f"; {self.activity} ends in at most {duration(max(0.0, left))}"
            where = self._where(self._ranks(), self.clock())
            self.say(f"waiting for the end of some measured steps, {duration(seconds)}: {where}{limit}")

    def _unmoved(self, ranks: dict[int, tuple[float, str]], now: float) -> str:
        moved = max([self._began, *(since for since, _ in ranks.values())])
        if now - moved > _GIVEN_UP:
            return f"no rank has moved for {duration(now - moved)}: {self._where(ranks, now)}"
        return ""

    def _ranks(self) -> dict[int, tuple[float, str]]:
        """Rank → when it last moved, and where it is."""
        found = {}
        for name, moved in self._movement.look().items():
            with contextlib.suppress(OSError, ValueError):
                place = (self.heartbeats / name).read_text(encoding="utf-8", errors="replace")
                found[int(name)] = (moved, place)
        return dict(sorted(found.items()))

    @staticmethod
    def _where(ranks: dict[int, tuple[float, str]], now: float) -> str:
        """Ranks at the same place are named together, those that have not moved for longest first."""
        if not ranks:
            return f"no rank has started on {socket.gethostname()}"
        places: dict[str, list[int]] = {}
        for rank, (_, place) in sorted(ranks.items(), key=lambda item: item[1][0]):
            places.setdefault(place, []).append(rank)
        parts = []
        for place, who in places.items():
            still = now - min(ranks[rank][0] for rank in who)
            names = f"rank {who[0]} is" if len(who) == 1 else f"ranks {', '.join(map(str, sorted(who)))} are"
            unmoved = f", not moved for {duration(still)}" if still > _STILL else ""
            parts.append(f"{names} in {place}{unmoved}")
        return f"{'; '.join(parts)} (host {socket.gethostname()})"
