"""How the launchers of a job on several hosts keep in step while they tune: attempt after attempt, all or none.

Elastic restarts nothing in an attempt, so a fault on one host ends that host's part alone. Its launcher says so in a
store, and the others end theirs. Then all say what they want next, and the next attempt begins on all of them.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from autoddp.isolation import Level

_GRACE = 3.0  # seconds that an attempt has for ending by itself after it has ended on another host
_ANSWER = timedelta(seconds=60)  # for one answer of the store; torch's own is five minutes
_PATIENCE = 120.0  # seconds in which every launcher must have said what it wants next
_SILENT = 10.0  # seconds of waiting before the user is told


@dataclass(frozen=True)
class Next:
    """What one launcher, or all together, want after an attempt."""

    more: bool
    """Another attempt."""
    why: str = ""
    """Why not, where tuning is over and no recipe was found."""
    level: Level = Level.OVERLAY
    """The isolation of the next attempt."""


class Hosts:
    """One host, or several that share a `store` (torch's, of which `set`, `get` and `check` are used)."""

    def __init__(self, store: Any = None, rank: int = 0, nodes: int = 1) -> None:
        self._store = store
        if store is not None:
            store.set_timeout(_ANSWER)
        self._rank = rank
        self._nodes = nodes
        self._heard_at = 0.0

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self._nodes > 1

    def worst(self, level: Level, say: Callable[[str], None]) -> Level:
        """The best level that all hosts allow."""
        found = [Level(word) for word in self._exchange("level", level.value, say)]
        return max(found, key=list(Level).index)

    def attempt_ended(self, number: int, failure: str) -> None:
        """Tell the others that this host's part of attempt `number` is over."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone, which the next question will tell
                self._store.set(f"attempt{number}/ended", json.dumps(failure))

    def ended_elsewhere(self, number: int) -> str | None:
        """Why attempt `number` has ended on another host, some seconds ago; None as long as it has not."""
        if self._store is None:
            return None
        try:
            if not self._store.check([f"attempt{number}/ended"]):
                self._heard_at = 0.0
                return None
            self._heard_at = self._heard_at or time.monotonic()
            if time.monotonic() - self._heard_at < _GRACE:
                return None
            return str(json.loads(self._store.get(f"attempt{number}/ended"))) or "it ended on another host"
        except RuntimeError as error:
            return f"the other hosts cannot be reached: {_first_line(error)}"

    def agree(self, number: int, wanted: Next, say: Callable[[str], None]) -> Next:
        """What all do after attempt `number`: another one only if all want it."""
        if self._store is None:
            return wanted
        mine = json.dumps([wanted.more, wanted.why, wanted.level.value])
        try:
            said = [json.loads(text) for text in self._exchange(f"attempt{number}/next", mine, say)]
        except (RuntimeError, TimeoutError) as error:
            return Next(False, wanted.why or f"the other hosts do not answer: {_first_line(error)}", wanted.level)
        others = [Next(more, why, Level(level)) for more, why, level in said]
        why = " | ".join(dict.fromkeys(filter(None, (wanted.why, *(other.why for other in others)))))
        level = max((other.level for other in others), key=list(Level).index)
        return Next(all(other.more for other in others), why, level)

    def of_the_first(self, key: str, mine: str, say: Callable[[str], None]) -> str:
        """What the first host says under a key; "" if the hosts do not answer."""
        try:
            return self._exchange(key, mine, say)[0]
        except (RuntimeError, TimeoutError):
            return ""

    def one_recipe(self, found: str, built_ddp: bool, say: Callable[[str], None]) -> tuple[str, bool]:
        """The recipe that all hosts launch with, and whether the script has built a DDP model on any.

        The recipe is "" if there is none, or if a host does not answer.
        """
        if self._store is None:
            return found, built_ddp
        try:
            said = [json.loads(text) for text in self._exchange("recipe", json.dumps([found, built_ddp]), say)]
        except (RuntimeError, TimeoutError) as error:
            say(f"warning: the recipe is not used, the other hosts do not answer: {_first_line(error)}")
            return "", built_ddp
        return next((recipe for recipe, _ in said if recipe), ""), any(built for _, built in said)

    def _exchange(self, key: str, mine: str, say: Callable[[str], None]) -> Sequence[str]:
        """What every launcher says under a key. TimeoutError if one does not, RuntimeError if the store is gone."""
        if self._store is None:
            return [mine]
        self._store.set(f"{key}/{self._rank}", mine)
        keys = [f"{key}/{rank}" for rank in range(self._nodes)]
        began, told = time.monotonic(), False
        while not self._store.check(keys):
            waited = time.monotonic() - began
            if waited > _PATIENCE:
                raise TimeoutError(f"waited {_PATIENCE:.0f} s for the launchers of {self._nodes} hosts")
            if waited > _SILENT and not told:
                told = True
                say(f"waiting for the launchers of the other hosts (up to {_PATIENCE:.0f} s)")
            time.sleep(0.05)
        return [self._store.get(name).decode() for name in keys]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
