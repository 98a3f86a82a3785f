"""What heartbeats say of this host's ranks, in words: where each is in the script, and which of them wait for others.

An attempt in which no rank has moved for half an hour before its first measurement is ended.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from autoddp.codec import decode
from autoddp.processes.children import has_loaded
from autoddp.units import duration, ranks_text
from autoddp.wire import Heartbeat

_FRESH = 5.0  # seconds after which a heartbeat says nothing any more; each rank writes one a second
_FOR_WHOM = 10.0  # seconds for which a rank waits for another one before a line names that one
_GIVEN_UP = 1800.0  # seconds without a movement of any rank; the usual time limit of torch's collectives
_BARE = 10.0  # seconds with torch in a process, and autoddp in none: a file *.pth may import torch before autoddp
_JOINS = 20.0  # seconds for which ranks have stood where they wait for processes of their own
_LEAVING = 3.0  # seconds that a rank takes to end behind such a wait
_NO_STEP = 7200.0  # seconds without a first measurement, where ranks move: they may look for what never comes
NOT_BEGUN = (
    "autoddp has got into no rank: it takes a Python that reads PYTHONPATH, which is not read under -I, -E and -S, and "
    "is not there under `env -i` and in many containers"
)
"""Why nothing can be measured where ranks begin without the worker."""
_OWN_RANKS = (
    "the script waits for processes that it has started itself. If they are its ranks, they wait in vain, because "
    "torchrun keeps the store at which ranks meet: stop this, and start it with --nproc-per-node 1 --objective steps"
)
"""What is told once where that may be so. For certain it is known only when they give up, half an hour later."""


@dataclass(frozen=True)
class Seen:
    """What a rank has last said of itself."""

    said: Heartbeat
    at: float
    """When this was seen first, by the launcher's clock: the system's time, which dates the files, may jump."""

    @property
    def moved(self) -> float:
        """When the rank last moved, by the same clock."""
        return self.at - self.said.still

    def waits(self, now: float) -> float:
        """Seconds for which the rank has only waited for others. 0.0 also where it says nothing any more."""
        return self.said.waits if now - self.at <= _FRESH else 0.0


class Ranks:
    """The ranks of this host in one attempt; `heartbeats` is the folder of their files.

    ranks = Ranks(folder)
    ranks.look()                 # called repeatedly; {0: Seen(…), 1: Seen(…)}
    """

    def __init__(self, heartbeats: Path = Path(), clock: Callable[[], float] = time.monotonic) -> None:
        self._heartbeats = heartbeats
        self._clock = clock
        self._seen: dict[int, tuple[int, Seen]] = {}
        self._joined: dict[int, float] = {}
        """Rank → when it was last seen to wait for processes of its own."""

    def look(self) -> dict[int, Seen]:
        """Rank → what it has said last."""
        now = self._clock()
        for path in self._heartbeats.glob("*"):
            with contextlib.suppress(OSError, ValueError):  # ValueError: it is just being written
                rank, stamp = int(path.name), path.stat().st_mtime_ns
                if rank not in self._seen or self._seen[rank][0] != stamp:
                    self._seen[rank] = (stamp, Seen(decode(path.read_bytes(), Heartbeat), now))
                    if self._seen[rank][1].said.joins:
                        self._joined[rank] = now
        return {rank: seen for rank, (_, seen) in sorted(self._seen.items())}

    @property
    def joining(self) -> int:
        """Ranks that have, when they were seen last, waited for processes of their own, or a moment before."""
        ranks = self.look()
        return sum(ranks[rank].at - at < _LEAVING for rank, at in self._joined.items())

    def waited(self, ended: Collection[int] = ()) -> float:
        """Seconds for which every rank has only waited for others, except those that have `ended`.

        0.0 as soon as one of them does anything else.
        """
        now = self._clock()
        return min((seen.waits(now) for rank, seen in self.look().items() if rank not in ended), default=0.0)


def places(ranks: Mapping[int, Seen], now: float) -> str:
    """A line with the place of each rank: those at one place together, and first those that have not moved longest."""
    if not ranks:
        return f"no rank has started on {socket.gethostname()}"
    together: dict[tuple[str, bool], list[int]] = {}
    for rank, seen in sorted(ranks.items(), key=lambda item: item[1].moved):
        together.setdefault((seen.said.place, seen.waits(now) > 0), []).append(rank)
    parts = []
    for (place, waits), who in together.items():
        one, several = ("waits", "wait") if waits else ("is", "are")
        parts.append(f"{ranks_text(who)} {one if len(who) == 1 else several} in {place}")
    return f"{'; '.join(parts)} (host {socket.gethostname()})"


@dataclass
class Waiting:
    """Watches one attempt. `heartbeats` is the folder of the ranks' files."""

    heartbeats: Path
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._began = self.clock()
        self._ranks = Ranks(self.heartbeats, self.clock)
        self._told = self._told_of_own = False
        self._bare_since = 0.0

    def waited(self, ended: Collection[int]) -> float:
        """See `Ranks.waited`."""
        return self._ranks.waited(ended)

    def in_vain(self) -> float:
        """Seconds for which all ranks of this host have only waited for others; 0.0 for one alone, which has others."""
        return self._ranks.waited() if len(self._ranks.look()) > 1 else 0.0

    def where(self, ended: Collection[int] = ()) -> str:
        """A line that says where the ranks are now that have not `ended`; "" if all have."""
        ranks = self._ranks.look()
        left = {rank: seen for rank, seen in ranks.items() if rank not in ended}
        return places(left, self.clock()) if left or not ranks else ""

    def unmoved(self) -> str:
        """Why the attempt must be ended: no rank has moved for long; else "". Ask repeatedly until it can measure."""
        now = self.clock()
        still = now - max([self._began, *(seen.moved for seen in self._ranks.look().values())])
        return f"no rank has moved for {duration(still)}: {self.where()}" if still > _GIVEN_UP else ""

    @property
    def joining(self) -> int:
        """See `Ranks.joining`."""
        return self._ranks.joining

    def own_ranks(self) -> str:
        """Call this repeatedly before the first steps: a line, once, where the ranks may have started others."""
        now, ranks = self.clock(), self._ranks.look().values()
        stand = bool(ranks) and all(seen.said.joins and now - seen.moved > _JOINS for seen in ranks)
        if not stand or self._told_of_own:
            return ""
        self._told_of_own = True
        return _OWN_RANKS

    def no_step(self) -> str:
        """Why the attempt must be ended that has no limit in time: it has come to no measurement for hours; else ""."""
        waited = self.clock() - self._began
        late = f"the script has made no step within {duration(waited)}, and --budget allows more: {self.where()}"
        return late if waited > _NO_STEP else ""

    @property
    def has_begun(self) -> bool:
        """Whether autoddp is, or was, in a process of this host. True where nobody knows: the folder was removed."""
        try:
            return any(self.heartbeats.iterdir())
        except OSError:
            return True

    def bare(self, keeper: int) -> str:
        """Why the attempt must be ended: torch is in a rank, and autoddp in none; else "". Ask as for `unmoved`.

        `keeper`: the id of the process whose child starts the ranks.
        """
        is_bare = not self.has_begun and has_loaded("libtorch", keeper)
        self._bare_since = (self._bare_since or self.clock()) if is_bare else 0.0
        return NOT_BEGUN if is_bare and self.clock() - self._bare_since >= _BARE else ""

    def for_whom(self, elsewhere: Collection[str] = (), unheard: Mapping[str, float] | None = None) -> str:
        """Call this repeatedly while steps are measured: a line, once, where ranks have waited for another one.

        `elsewhere`: other hosts on which a rank works. `unheard`: those of which nothing is heard, for so many seconds.
        """
        now, ranks = self.clock(), self._ranks.look()
        waits = {rank: seen for rank, seen in ranks.items() if seen.waits(now)}
        work = {rank: seen for rank, seen in ranks.items() if rank not in waits}
        longest = max((now - seen.moved for seen in waits.values()), default=0.0)
        if longest < _FOR_WHOM or not (work or elsewhere or unheard):
            self._told = False
            return ""
        if self._told:
            return ""
        self._told = True
        others = [f"a rank on {', '.join(elsewhere)} works"] if elsewhere else []
        silent = [f"{name} has not been heard of for {duration(seconds)}" for name, seconds in (unheard or {}).items()]
        whom = places(work, now) if work else "; ".join(others + silent)
        have = "has" if len(waits) == 1 else "have"
        return f"{ranks_text(waits)} {have} waited for {duration(longest)} for another one: {whom}"
