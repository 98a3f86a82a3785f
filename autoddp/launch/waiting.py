"""Nobody waits without a word: while an attempt has not come to its first measurement, a line says where its ranks are.

And nobody waits for ever: an attempt in which no rank has moved for half an hour is ended.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from autoddp.launch.movement import Movement
from autoddp.units import duration

_FIRST_WORD = 30.0  # seconds until the first line
_NEXT_WORD = 60.0  # seconds from one line to the next: a start that takes long must not fill the terminal
_STILL = 5.0  # seconds without a movement that are worth a word; a rank's file is touched about every second
_GIVEN_UP = 1800.0  # seconds without a movement of any rank; torch's own collectives give up after as many


@dataclass
class Waiting:
    """For one attempt. `heartbeats` is the folder of the ranks' files, see `worker.heartbeat`."""

    heartbeats: Path
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _began: float = field(init=False)
    _told: float | None = None
    _movement: Movement = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()
        self._movement = Movement(self.heartbeats, self.clock)

    def look(self) -> str:
        """Ask this now and then until the attempt is ready: why it must be ended, or ""."""
        now = self.clock()
        ranks = self._ranks()
        unmoved = self._unmoved(ranks, now)
        due = self._began + _FIRST_WORD if self._told is None else self._told + _NEXT_WORD
        if not unmoved and now > due:
            self._told = now
            self.say(f"waiting for the first steps, {duration(now - self._began)}: {self._where(ranks, now)}")
        return unmoved

    def look_in_silence(self) -> str:
        """As `look`, without lines for the user."""
        return self._unmoved(self._ranks(), self.clock())

    def _unmoved(self, ranks: dict[int, tuple[float, str]], now: float) -> str:
        moved = max([self._began, *(since for since, _ in ranks.values())])
        if now - moved > _GIVEN_UP:
            return f"no rank has moved for {duration(now - moved)}: {self._where(ranks, now)}"
        return ""

    def _ranks(self) -> dict[int, tuple[float, str]]:
        """Rank → when it last moved, and where it is."""
        found = {}
        for name, moved in self._movement.look().items():
            try:
                place = (self.heartbeats / name).read_text(encoding="utf-8", errors="replace")
                found[int(name)] = (moved, place)
            except (OSError, ValueError):
                continue
        return dict(sorted(found.items()))

    @staticmethod
    def _where(ranks: dict[int, tuple[float, str]], now: float) -> str:
        """Ranks at the same place are named together; the place that was not left for longest comes first."""
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
