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
from functools import cached_property
from typing import Any

from autoddp.errors import HostLost
from autoddp.isolation import Level
from autoddp.launch.gathering import Endpoint
from autoddp.launch.presence import HostsGone, Presence

_GRACE = 3.0  # seconds that an attempt has for ending by itself after it has ended on another host
_ANSWER = timedelta(seconds=60)  # for one answer of the store; torch's own is five minutes
_PATIENCE = 120.0  # seconds in which every launcher must have said what it wants next
_RETURN = 60.0  # seconds that a host has for coming back before the job is given up for lack of it
_READING = 10.0  # seconds that the others have for reading what was decided
_LOOKS = 0.05  # seconds between two questions to the store, which answers all hosts
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
    """One host, or several that share a `store` (torch's).

    `fewest`: how many the job needs. `name`: this host's. `endpoint`: where they meet.
    """

    def __init__(
        self,
        store: Any = None,
        rank: int = 0,
        nodes: int = 1,
        *,
        fewest: int = 0,
        name: str = "",
        endpoint: Endpoint | None = None,
    ) -> None:
        self._store = store
        if store is not None:
            store.set_timeout(_ANSWER)
        self._rank = rank
        self._nodes = nodes
        self._fewest = fewest or nodes
        self._name = name or f"node {rank}"
        self._endpoint = endpoint
        self._heard_at = 0.0

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self._nodes > 1

    @cached_property
    def _presence(self) -> Presence:
        return Presence(self._store, self._rank, self._nodes, self._name, self._endpoint)

    @property
    def why_over(self) -> str:
        """Why tuning has to end on all hosts: one is gone; "" as long as all are here."""
        return "" if self._store is None else self._presence.why_over

    def end(self, why: str) -> None:
        """Tell the others that tuning has to end on all hosts; this one stays."""
        if self._store is not None:
            self._presence.end(why)

    def leave(self, why: str) -> None:
        """Tell the others that this host tunes no more, and starts no job; they hear it at once."""
        if self._store is not None:
            self._presence.leave(why)

    def close(self) -> None:
        """Tuning is over on all hosts; nothing may be asked from here on."""
        if self._store is not None:
            self._presence.stop()

    def worst(self, level: Level, say: Callable[[str], None]) -> Level:
        """The best level that all hosts allow."""
        found = [Level(word) for word in self._exchange("level", level.value, say)]
        return max(found, key=list(Level).index)

    def attempt_ended(self, number: int, failure: str) -> None:
        """Tell the others that this host's part of attempt `number` is over."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone, which the next question will tell
                self._set(f"attempt{number}/ended", json.dumps(failure))

    def ended_elsewhere(self, number: int) -> str | None:
        """Why attempt `number` has ended on another host, some seconds ago; None as long as it has not."""
        if self._store is None:
            return None
        try:
            if not self._are_there([f"attempt{number}/ended"]):
                self._heard_at = 0.0
                return None
            self._heard_at = self._heard_at or time.monotonic()
            if time.monotonic() - self._heard_at < _GRACE:
                return None
            return str(json.loads(self._get(f"attempt{number}/ended"))) or "it ended on another host"
        except RuntimeError as error:
            return f"the other hosts cannot be reached: {_first_line(error)}"

    def agree(self, number: int, wanted: Next, say: Callable[[str], None]) -> Next:
        """What all do after attempt `number`: another one only if all want it."""
        if self._store is None:
            return wanted
        mine = json.dumps([wanted.more, wanted.why, wanted.level.value])
        try:
            said = [json.loads(text) for text in self._exchange(f"attempt{number}/next", mine, say)]
        except HostsGone as gone:
            return Next(False, str(gone), wanted.level)
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

        The recipe is "" if there is none, or if a host says nothing. HostLost if the job cannot run with the hosts that
        are left. A silent one is waited for, for a minute.
        """
        if self._store is None:
            return found, built_ddp
        try:
            self._set(f"recipe/{self._rank}", json.dumps([found, built_ddp]))
            decided = self._decided_by_the_first(self._absent("recipe", say))
        except (RuntimeError, TimeoutError) as error:
            raise HostLost(f"{self._presence.why_over or _first_line(error)}; no job is started") from None
        without: list[int] = decided["without"]
        self._until_all_have_read(without)
        if self._rank in without:
            raise HostLost("the other hosts had not heard of this one for too long, and go on without it")
        here = self._nodes - len(without)
        if here < self._fewest:
            raise HostLost(f"{decided['why']}; the job needs {self._fewest} hosts, and no job is started")
        if decided["why"]:
            say(f"warning: the recipe is not used: {decided['why']}")
        return str(decided["recipe"]), bool(decided["built_ddp"])

    def _absent(self, key: str, say: Callable[[str], None]) -> list[int]:
        """The launchers that say nothing under a key and are not waited for any longer."""
        began, told = time.monotonic(), False
        while absent := [rank for rank in range(self._nodes) if not self._are_there([f"{key}/{rank}"])]:
            gone = self._presence.missing()
            back = [rank for rank in absent if not self._presence.has_left(rank)]
            patience = _RETURN if all(rank in gone for rank in absent) else _PATIENCE
            waited = time.monotonic() - began
            if not back or waited > patience:
                break
            if waited > _SILENT and not told:
                told = True
                names = ", ".join(self._presence.name_of(rank) for rank in back)
                say(f"waiting for {names} (up to {patience:.0f} s)")
            time.sleep(_LOOKS)
        return absent

    def _decided_by_the_first(self, absent: list[int]) -> dict[str, Any]:
        """What the first of all launchers decides here, for all: a host that comes back must not decide otherwise."""
        if self._presence.ask(lambda store: store.add("recipe/votes", 1)) == 1:
            gone = self._presence.missing()
            names = [f"{self._presence.name_of(rank)} {gone.get(rank, 'does not answer')}" for rank in absent]
            here = [rank for rank in range(self._nodes) if rank not in absent]
            said = [json.loads(self._get(f"recipe/{rank}")) for rank in here]
            mine = {
                "recipe": "" if absent else next((recipe for recipe, _ in said if recipe), ""),
                "built_ddp": any(built for _, built in said),
                "without": [rank for rank in absent if rank in gone],
                "why": ", ".join(names),
            }
            self._set("recipe/decided", json.dumps(mine))
        began = time.monotonic()
        while not self._are_there(["recipe/decided"]):
            if time.monotonic() - began > _ANSWER.total_seconds():
                raise TimeoutError("the launcher that was to decide for all hosts does not answer")
            time.sleep(_LOOKS)
        decided: dict[str, Any] = json.loads(self._get("recipe/decided"))
        return decided

    def _until_all_have_read(self, without: list[int]) -> None:
        """Whoever hosts the store leaves last: the others still have to read."""
        keys = [f"recipe/read/{rank}" for rank in range(self._nodes) if rank not in without]
        began = time.monotonic()
        with contextlib.suppress(RuntimeError):  # it has left, because this host was the last to read
            self._set(f"recipe/read/{self._rank}", "")
            while not self._are_there(keys) and time.monotonic() - began < _READING:
                time.sleep(_LOOKS)

    def _exchange(self, key: str, mine: str, say: Callable[[str], None]) -> Sequence[str]:
        """What every launcher says under a key.

        HostsGone if one is gone, TimeoutError if one says nothing, RuntimeError if the store cannot be asked.
        """
        if self._store is None:
            return [mine]
        self._set(f"{key}/{self._rank}", mine)
        keys = [f"{key}/{rank}" for rank in range(self._nodes)]
        began, told = time.monotonic(), False
        while not self._are_there(keys):
            waited = time.monotonic() - began
            if self._presence.why_over:
                raise HostsGone(self._presence.why_over)
            if waited > _PATIENCE:
                why = f"waited {_PATIENCE:.0f} s for the launchers of {self._nodes} hosts"
                self._presence.end(why)
                raise TimeoutError(why)
            if waited > _SILENT and not told:
                told = True
                say(f"waiting for the launchers of the other hosts (up to {_PATIENCE:.0f} s)")
            time.sleep(_LOOKS)
        return [self._get(name) for name in keys]

    def _set(self, key: str, text: str) -> None:
        self._presence.ask(lambda store: store.set(key, text))

    def _are_there(self, keys: list[str]) -> bool:
        return self._presence.ask(lambda store: bool(store.check(keys)))

    def _get(self, key: str) -> str:
        """Only of a key that is there."""
        return self._presence.ask(lambda store: str(store.get(key).decode()))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
