"""How the launchers of a job on several hosts stay together while they tune: each attempt runs on all hosts or on none.

Elastic restarts nothing in an attempt, so a fault on one host ends that host's part alone. Its launcher says so in a
store, and the others end theirs. Then all say what they want next, and the next attempt begins on all of them.

The launcher on the host of rank 0 leads: it alone has a study. It tells the others what they have to do beside running
the script, and at the end what came of it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

from autoddp.codec import decode, encode
from autoddp.errors import HostLost, first_line
from autoddp.hosts.presence import HostsGone, Presence
from autoddp.isolation import Level
from autoddp.network.gathering import Endpoint
from autoddp.processes.polling import polls
from autoddp.processes.signals import Interrupted
from autoddp.processes.silence import awaiting

_GRACE = 3.0  # seconds that an attempt has for ending by itself after it has ended on another host
_ANSWER = timedelta(seconds=60)  # for one answer of the store; torch's own is five minutes
_PATIENCE = 120.0  # seconds in which every launcher must have said what it wants next
_RETURN = 60.0  # seconds that a missing host has for coming back before the job is given up without it
_READING = 10.0  # seconds that the others have for reading what was decided
_LOOKS = 0.25  # seconds between two looks whether the launcher that leads has said something
_PART = 2**20  # characters of a long text under one key; the store takes no more than 8 MiB
_SILENT = 10.0  # seconds of waiting before the user is told
_OTHERS = "the launchers of the other hosts"
ENDED_THERE = "it ended on another host"
"""Why an attempt ends here if nothing has failed there: the script has ended."""

T = TypeVar("T")


@dataclass(frozen=True)
class Next:
    """What one launcher wants after an attempt, or all together."""

    more: bool
    """Another attempt."""
    why: str = ""
    """Why not, where tuning is over and no recipe was found."""
    level: Level = Level.OVERLAY
    """The isolation of the next attempt."""
    variables: dict[str, str] = field(default_factory=dict)
    """Variables that the study wants the next attempt to have; none from a launcher that has no study."""


@dataclass(frozen=True)
class _Decision:
    """What one launcher decides for all of them at the end."""

    leader: int | None
    """The launcher whose answer all take; None: there is none, or a host is missing."""
    built_ddp: bool
    without: list[int]
    """The launchers that are left out."""
    why: str
    """Which launchers said nothing, and why; "" if all did."""


@dataclass(eq=False)
class Hosts:
    """One host, or several that share a `store`. Methods that ask the others do nothing where there is one."""

    store: Any = None
    """torch's; None where there is one host."""
    rank: int = 0
    nodes: int = 1
    fewest: int = 0
    """How many hosts the job needs; 0: all."""
    name: str = ""
    """This host's, for the others' messages."""
    endpoint: Endpoint | None = None
    """The endpoint at which the hosts meet."""
    ranks: tuple[int, ...] = ()
    """How many ranks each host starts; empty where there is one host."""
    ahead: float = 0.0
    """Seconds by which this host's clock is ahead of the first host's; 0.0 where they agree, as far as is known."""
    _ended_elsewhere_at: float = 0.0
    _without: list[int] = field(default_factory=list)
    """The launchers that were left out when all decided what to launch."""

    def __post_init__(self) -> None:
        if self.store is not None:
            self.store.set_timeout(_ANSWER)

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.nodes > 1

    @property
    def left(self) -> int:
        """With how many hosts the job starts: those that were lost in tuning take no part."""
        return self.nodes - len(self._without)

    @cached_property
    def _presence(self) -> Presence:
        return Presence(self.store, self.rank, self.nodes, self.name or f"node {self.rank}", self.endpoint)

    @property
    def why_over(self) -> str:
        """Why tuning has to end on all hosts: one is gone; "" as long as all are here."""
        return "" if self.store is None else self._presence.why_over

    def waits(self, seconds: float) -> None:
        """Tell the others for how long all ranks of this host have only waited for other ranks."""
        if self.store is not None:
            self._presence.waited = seconds

    def waited(self) -> float:
        """Seconds for which all ranks of all other hosts have only waited."""
        return min(self._presence.waited_elsewhere().values()) if self.several else math.inf

    @property
    def at_work(self) -> list[str]:
        """The other hosts on which a rank does something else than waiting for others, by name."""
        if not self.several:
            return []
        unheard = self._presence.unheard()
        waited = self._presence.waited_elsewhere()
        return [name for name, seconds in waited.items() if not seconds and name not in unheard]

    @property
    def unheard(self) -> dict[str, float]:
        """The other hosts of which nothing is heard, by name, and for how many seconds."""
        return self._presence.unheard() if self.several else {}

    def end(self, why: str) -> None:
        """Tell the others that tuning has to end on all hosts; this launcher goes on to the job."""
        if self.store is not None:
            self._presence.end(why)

    def leave(self, why: str | BaseException) -> None:
        """Tell the others that this host tunes no more and starts no job; they know it before this returns."""
        if self.store is not None:
            self._presence.leave(why if isinstance(why, str) else _why(why))

    def close(self) -> None:
        """Tuning is over on all hosts; nothing may be asked from here on."""
        if self.store is not None:
            self._presence.stop()

    def worst(self, level: Level, say: Callable[[str], None]) -> Level:
        """The best level that all hosts allow."""
        return max(self.exchange("level", level, Level, say), key=list(Level).index)

    def attempt_ended(self, number: int, failure: str) -> None:
        """Tell the others that this host's part of attempt `number` is over. The first of several failures stays."""
        if self.store is not None:
            key = f"attempt{number}/ended"
            with contextlib.suppress(RuntimeError):  # the store is gone, which the next question will report
                if not (self._are_there([key]) and self._get(key, str)):
                    self._set(key, f"{self.name or f'node {self.rank}'}: {failure}" if failure else "")

    def ended_elsewhere(self, number: int) -> str | None:
        """Why attempt `number` has ended on another host, some seconds ago; None as long as it has not."""
        if self.store is None:
            return None
        try:
            if not self._are_there([f"attempt{number}/ended"]):
                self._ended_elsewhere_at = 0.0
                return None
            self._ended_elsewhere_at = self._ended_elsewhere_at or time.monotonic()
            if time.monotonic() - self._ended_elsewhere_at < _GRACE:
                return None
            return self._get(f"attempt{number}/ended", str) or ENDED_THERE
        except RuntimeError as error:
            return f"the other hosts cannot be reached: {first_line(error)}"

    def agree(self, number: int, wanted: Next, say: Callable[[str], None]) -> Next:
        """What all do after attempt `number`: another one only if all want it."""
        try:
            all_ = self.exchange(f"attempt{number}/next", wanted, Next, say)
        except HostsGone as gone:
            return Next(False, str(gone), wanted.level)
        except (RuntimeError, TimeoutError) as error:
            return Next(False, wanted.why or f"the other hosts do not answer: {first_line(error)}", wanted.level)
        whys = dict.fromkeys(filter(None, (wanted.why, *(one.why for one in all_))))
        # What has failed on one host has its name before it on the others.
        why = " | ".join(one for one in whys if not any(other != one and other.endswith(one) for other in whys))
        level = max((one.level for one in all_), key=list(Level).index)
        variables = {name: value for one in all_ for name, value in one.variables.items()}
        return Next(all(one.more for one in all_), why, level, variables)

    def tell(self, key: str, value: object) -> None:
        """Tell the others something, where this launcher leads."""
        if self.store is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone, which the next question will report
                self._set(f"leader/{key}", value)

    def await_told(self, key: str, kind: type[T], over: Callable[[], bool]) -> T | None:
        """What the launcher that leads tells under a key; None once `over()`, or where the store is gone."""
        with contextlib.suppress(RuntimeError):
            while not over():
                if self._are_there([f"leader/{key}"]):
                    return self._get(f"leader/{key}", kind)
                time.sleep(_LOOKS)
        return None

    def of_the_first(self, key: str, mine: str, say: Callable[[str], None]) -> str:
        """What the first host says under a key; "" if the hosts do not answer."""
        try:
            return self.exchange(key, mine, str, say)[0]
        except (RuntimeError, TimeoutError):
            return ""

    def count_me(self, key: str) -> None:
        """Count this host among those that have come to a point, which the key names."""
        if self.store is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone, which `why_over` tells
                self._presence.ask(lambda store: store.add(key, 1))

    def counted(self, key: str) -> int:
        """How many hosts have come to that point; of one host nobody asks."""
        with contextlib.suppress(RuntimeError):
            return self._presence.ask(lambda store: int(store.add(key, 0)))
        return 0

    def exchange(self, key: str, mine: T, kind: type[T], say: Callable[[str], None]) -> list[T]:
        """What every launcher says under a key.

        HostsGone if one is gone, TimeoutError if one says nothing, RuntimeError if the store cannot be asked.
        """
        if self.store is None:
            return [mine]
        self._set(f"{key}/{self.rank}", mine)
        keys, told = [f"{key}/{rank}" for rank in range(self.nodes)], False
        with awaiting(_OTHERS):
            for waited in polls(_PATIENCE):
                if self._are_there(keys):
                    return [self._get(name, kind) for name in keys]
                if self._presence.why_over:
                    raise HostsGone(self._presence.why_over)
                if waited > _SILENT and not told:
                    told = True
                    say(f"waiting for {_OTHERS} (up to {_PATIENCE:.0f} s)")
        why = f"waited {_PATIENCE:.0f} s for the launchers of {self.nodes} hosts"
        self._presence.end(why)
        raise TimeoutError(why)

    def one_answer(self, mine: str, built_ddp: bool, say: Callable[[str], None], leads: bool) -> tuple[str, bool]:
        """What came of tuning, as a text, and whether the script has built a DDP model on any host.

        It is the text of the launcher that leads; "" if there is none, or if a host says nothing. HostLost if the job
        cannot run with the hosts that are left. A silent one is waited for, for a minute, and so is the one that keeps
        the store.
        """
        if self.store is None:
            return mine, built_ddp
        try:
            with awaiting(_OTHERS):
                self._presence.await_store(_RETURN, say)  # as long as the others wait for this host
                parts = [mine[at : at + _PART] for at in range(0, len(mine), _PART)] if leads else []
                for number, part in enumerate(parts):
                    self._set(f"answer/{self.rank}/{number}", part)
                self._set(f"answer/{self.rank}", (leads, built_ddp, len(parts)))
                decided = self._decided_once("answer", lambda: self._decision(self._absent("answer", say)), _Decision)
                answer = mine if decided.leader == self.rank else self._answer_of(decided.leader)
        except (RuntimeError, TimeoutError) as error:
            raise HostLost(f"{self._presence.why_over or first_line(error)}; no job is started") from None
        self.until_all_have_read(decided.without)
        if self.rank in decided.without:
            raise HostLost("the other hosts had not heard of this one for too long, and go on without it")
        self._without = decided.without
        self._require(self.left, decided.why)
        if decided.why:
            say(f"warning: the recipe is not used: {decided.why}")
        return answer, decided.built_ddp

    @contextlib.contextmanager
    def launching(self, say: Callable[[str], None], job: bool = True) -> Iterator[None]:
        """A context in which this host tunes and prepares the `job`: at its end all hosts launch it, or none does.

        A host may still be ended when all have decided what to launch, and the others would wait for it in silence, as
        long as torchrun does. HostLost where one is gone that the job needs. Afterwards nothing may be asked.
        """
        try:
            yield
            if job and self.store is not None:
                self._launch_together(say)
        except BaseException as error:
            if job and self.store is not None:
                with contextlib.suppress(RuntimeError):  # the store is gone, or this launcher has left before
                    self._set(f"launching/{self.rank}", _why(error))  # it may just have said that it launches the job
            self.leave(error)
            raise
        finally:
            self.close()

    def _launch_together(self, say: Callable[[str], None]) -> None:
        try:
            with awaiting(_OTHERS):
                self._presence.await_store(_RETURN, say)
                self._set(f"launching/{self.rank}", "")
                lost = self._decided_once("launching", lambda: self._gone(self._absent("launching", say)), list[str])
        except (RuntimeError, TimeoutError) as error:
            raise HostLost(f"{self._presence.why_over or first_line(error)}; no job is started") from None
        # Where the job can spare them it is launched as all have decided: some hosts may be launching it already.
        self._require(self.left - len(lost), ", ".join(lost))
        if lost:
            say(f"warning: {', '.join(lost)}; the job starts with the hosts that come")

    def _gone(self, absent: Collection[int]) -> list[str]:
        """Why, with the host's name, each launcher that is gone will not launch the job with the others."""
        missing = self._presence.missing()
        gone = {rank: missing[rank] for rank in absent if rank in missing}
        for rank in range(self.nodes):
            if rank not in [*absent, *self._without] and (why := self._get(f"launching/{rank}", str)):
                gone[rank] = f"has left: {why}"  # read here, because a beat comes up to a second later
        return [f"{self._presence.name_of(rank)} {why}" for rank, why in gone.items()]

    def _require(self, hosts: int, why: str) -> None:
        """HostLost where so many hosts are too few for the job."""
        needed = self.fewest or self.nodes
        if hosts < needed:
            raise HostLost(f"{why}; the job needs {needed} hosts, and no job is started")

    def until_all_have_read(self, without: Collection[int] = ()) -> None:
        """Wait, for some seconds, until the others have read what was decided: the store may end with this launcher."""
        if self.store is None:
            return
        keys = [f"answer/read/{rank}" for rank in range(self.nodes) if rank not in without]
        with contextlib.suppress(RuntimeError):  # it has left, because this host was the last to read
            self._set(f"answer/read/{self.rank}", True)
            for _ in polls(_READING):
                if self._are_there(keys):
                    return

    def _answer_of(self, leader: int | None) -> str:
        if leader is None:
            return ""
        _, _, parts = self._get(f"answer/{leader}", tuple[bool, bool, int])
        return "".join(self._get(f"answer/{leader}/{number}", str) for number in range(parts))

    def _absent(self, key: str, say: Callable[[str], None]) -> list[int]:
        """Wait until each launcher has written under `key`; returns those that are not waited for any longer."""
        told, absent = False, []
        for waited in polls(_PATIENCE):
            here = [rank for rank in range(self.nodes) if rank not in self._without]
            absent = [rank for rank in here if not self._are_there([f"{key}/{rank}"])]
            gone = self._presence.missing()
            back = [rank for rank in absent if not self._presence.has_left(rank)]
            patience = _RETURN if all(rank in gone for rank in absent) else _PATIENCE
            if not back or waited > patience:
                break
            if waited > _SILENT and not told:
                told = True
                names = ", ".join(self._presence.name_of(rank) for rank in back)
                say(f"waiting for {names} (up to {patience:.0f} s)")
        return absent

    def _decision(self, absent: list[int]) -> _Decision:
        gone = self._presence.missing()
        names = [f"{self._presence.name_of(rank)} {gone.get(rank, 'does not answer')}" for rank in absent]
        here = [rank for rank in range(self.nodes) if rank not in absent]
        said = {rank: self._get(f"answer/{rank}", tuple[bool, bool, int]) for rank in here}
        leaders = [rank for rank, (leads, _, _) in said.items() if leads]
        return _Decision(
            leader=None if absent else next(iter(leaders), None),
            built_ddp=any(built for _, built, _ in said.values()),
            without=[rank for rank in absent if rank in gone],
            why=", ".join(names),
        )

    def _decided_once(self, key: str, mine: Callable[[], T], kind: type[T]) -> T:
        """What the first launcher to come here decides for all: a host that comes back must not decide otherwise."""
        found = mine()
        if self._presence.ask(lambda store: store.add(f"{key}/votes", 1)) == 1:
            self._set(f"{key}/decided", found)
        for _ in polls(_ANSWER.total_seconds()):
            if self._are_there([f"{key}/decided"]):
                return self._get(f"{key}/decided", kind)
        raise TimeoutError("the launcher that was to decide for all hosts does not answer")

    def _set(self, key: str, value: Any) -> None:
        self._presence.ask(lambda store: store.set(key, encode(value)))

    def _are_there(self, keys: list[str]) -> bool:
        return self._presence.ask(lambda store: bool(store.check(keys)))

    def _get(self, key: str, kind: type[T]) -> T:
        """The value of a key, which must be there."""
        return decode(self._presence.ask(lambda store: store.get(key)), kind)


def _why(error: BaseException) -> str:
    """Why this launcher leaves the others, in a few words."""
    return error.name if isinstance(error, Interrupted) else f"it failed: {error}"
