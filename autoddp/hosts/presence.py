"""Which launchers of a job on several hosts are still running, while the job is being tuned.

    presence = Presence(store, rank=0, nodes=2, name="host0")
    presence.ask(lambda store: store.check(["key"]))     # the store is used in this way alone
    presence.why_over                                    # "host1 has not been heard of for 31 s", or ""
    presence.leave("it was ended by SIGINT")             # the others hear of it within a second

Each launcher writes a *beat* into the store that all share, once a second, and reads the others' beats: a launcher
whose beat does not change for half a minute is missing, and one that leaves writes so. One thread does this and asks
all other questions to the store, because a host that is switched off may leave a question without an answer for a
quarter of an hour.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswerYet
from dataclasses import dataclass, field
from typing import Any, TypeVar

from autoddp.codec import decode, encode
from autoddp.errors import first_line
from autoddp.network.gathering import Endpoint
from autoddp.processes.polling import polls
from autoddp.torchrun.meetings import connection_is_lost

_BEAT = 1.0  # seconds between two beats
_MISSING = 30.0  # seconds without a beat; torch elastic gives a node up after 15
_FAREWELL = 3.0  # seconds for which a launcher that leaves waits until the others have read so
_FRESH = 3.0  # seconds after which a beat does not tell any more what its host's ranks do
_LONGEST_LOOK = 2.0  # seconds; if more pass between two looks, this process was stopped itself

T = TypeVar("T")


class HostsGone(RuntimeError):
    """Tuning on several hosts has to end; the text says which host is gone, or that the store is."""


@dataclass(frozen=True)
class _Beat:
    """What a launcher has in the store."""

    number: int
    name: str
    """Name of the launcher's host."""
    over: str = ""
    """Why tuning must end on all hosts, as far as this launcher knows; "" as long as it may go on."""
    left: str = ""
    """Why this launcher has left; "" as long as it is here."""
    waited: float = 0.0
    """Seconds for which all ranks of its host have only waited for others; see `wire.Heartbeat.waits`."""


@dataclass
class _Stopwatch:
    """Seconds since the last `reset`, except those in which this process was stopped and so could not look."""

    seconds: float = 0.0
    _looked: float = field(default_factory=time.monotonic)

    def look(self) -> float:
        now = time.monotonic()
        self.seconds += min(now - self._looked, _LONGEST_LOOK)
        self._looked = now
        return self.seconds

    def reset(self) -> None:
        self.seconds, self._looked = 0.0, time.monotonic()


class _Line:
    """A connection of its own to the store's port at the endpoint: when it ends, the store may be gone.

    torch's client would tell so too, but with a warning of twenty lines.
    """

    def __init__(self, endpoint: Endpoint | None) -> None:
        self._endpoint = endpoint
        self._socket: socket.socket | None = None
        self._connect()

    def broken(self) -> str:
        """Why the store is certainly gone; "" as long as it may be there."""
        if self._socket is None:
            return ""
        try:
            ended = not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return ""  # nothing to read: the connection stands
        except OSError:
            ended = True
        return self._connect() if ended else ""

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self) -> str:
        """Why nobody listens there; "" if somebody does, or if that is unknown."""
        self.close()
        if self._endpoint is not None:
            try:
                self._socket = socket.create_connection((self._endpoint.host, self._endpoint.port), _BEAT)
                self._socket.setblocking(False)
            except ConnectionRefusedError:
                return "nobody listens there any more"
            except OSError:
                pass
        return ""


class Presence:
    """Shows the other launchers that this one runs, and knows which of them do.

    `nodes` launchers share the `store`, which is at the `endpoint`, where it has one.
    """

    def __init__(self, store: Any, rank: int, nodes: int, name: str, endpoint: Endpoint | None = None) -> None:
        self._store, self._rank, self._name = store, rank, name
        self._others = [other for other in range(nodes) if other != rank]
        self._where = f"at {endpoint}, " if endpoint is not None else ""
        self._line = _Line(endpoint)
        self._number = 0
        self._over = self._left = self._broken = self._gave_up = ""
        self._is_stopped = False
        self.waited = 0.0
        """Seconds for which all ranks of this host have only waited, see `_Beat`; whoever knows it writes it."""
        self._beats: dict[int, _Beat] = {}
        self._still = {other: _Stopwatch() for other in self._others}
        self._unanswered = _Stopwatch()
        self._lock = threading.Lock()
        """Guards the beats, the stopwatches, and why this launcher ends or leaves."""
        self._questions: queue.Queue[tuple[Callable[[Any], Any], Future[Any]] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._live, name="autoddp-hosts", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # a thread that is in torch when Python ends would end the process by an abort

    # Called by any thread

    def ask(self, question: Callable[[Any], T]) -> T:
        """What the question, given the store, returns; what it raises. HostsGone if there is no answer."""
        reply: Future[T] = Future()
        self._questions.put((question, reply))
        while True:
            try:
                return reply.result(_BEAT / 2)
            except NoAnswerYet:
                if self._is_stopped:  # another thread, such as the study's, may ask once more
                    raise HostsGone("this launcher has left the others") from None
                if self.store_is_gone:
                    raise HostsGone(self.store_is_gone) from None

    @property
    def why_over(self) -> str:
        """Why tuning has to end on all hosts; "" as long as all are here."""
        gone = self.store_is_gone
        with self._lock:
            for rank, why in self._gone().items():
                self._over = self._over or f"{self.name_of(rank)} {why}"
            if gone and self._over in ("", self._gave_up):  # told with the seconds until now
                # The store may answer again, as where its launcher was stopped for a while: then the others hear of it.
                self._over = self._gave_up = gone
            return self._over

    @property
    def store_is_gone(self) -> str:
        """Why the store cannot be asked any more; "" as long as it can."""
        if self._broken:
            return f"the launcher {self._where}where the hosts meet, is gone ({self._broken})"
        with self._lock:
            seconds = self._unanswered.look()
        if seconds > _MISSING:
            return f"the launcher {self._where}where the hosts meet, has not answered for {seconds:.0f} s"
        return ""

    def await_store(self, limit: float, say: Callable[[str], None]) -> None:
        """Return once the store answers again, or after `limit` seconds; at once if its connection has broken."""
        told = False
        for _ in polls(limit):
            if self._broken or not self.store_is_gone:
                return
            if not told:
                told = True
                say(f"{self.store_is_gone}: waiting for it (up to {limit:.0f} s)")

    def missing(self) -> dict[int, str]:
        """Rank → why, of the launchers that are not here now: "has left: …" or "has not been heard of for …"."""
        with self._lock:
            return self._gone()

    def has_left(self, rank: int) -> bool:
        """Whether a launcher has written that it will not come back."""
        with self._lock:
            return rank in self._beats and bool(self._beats[rank].left)

    def name_of(self, rank: int) -> str:
        """The host's name, or its number as long as it has written no beat."""
        return self._beats[rank].name if rank in self._beats else f"node {rank}"

    def waited_elsewhere(self) -> dict[str, float]:
        """The other hosts' names, and for how many seconds all ranks there have only waited for others."""
        with self._lock:
            fresh = {other: self._still[other].seconds <= _FRESH and other in self._beats for other in self._others}
            return {self.name_of(o): self._beats[o].waited if fresh[o] else 0.0 for o in self._others}

    def unheard(self) -> dict[str, float]:
        """The other hosts of which nobody knows what their ranks do, and for how many seconds nothing was heard."""
        with self._lock:
            return {self.name_of(o): self._still[o].seconds for o in self._others if self._still[o].seconds > _FRESH}

    def end(self, why: str) -> None:
        """Tell all hosts that tuning has to end."""
        with self._lock:
            self._over = self._over or why
        self._beat_soon()

    def leave(self, why: str) -> None:
        """Tell the others that tuning ends here; returns once they know it, at the latest after some seconds.

        Without effect where this launcher has left or stopped before.
        """
        if self._is_stopped:
            return
        with self._lock:
            self._left = why
        self._beat_soon()
        for _ in polls(_FAREWELL):
            if self._heard_by_all() or self.store_is_gone:
                break
        self.stop()

    def stop(self) -> None:
        """Write no more beats. Whoever asks from here on gets HostsGone."""
        self._is_stopped = True
        self._questions.put(None)
        self._thread.join(_BEAT)  # it may wait for an answer that does not come

    def _beat_soon(self) -> None:
        self._questions.put((lambda _: self._beat(), Future()))

    def _heard_by_all(self) -> bool:
        with self._lock:
            gone = self._gone()
            return all(other in gone or (other in self._beats and self._beats[other].over) for other in self._others)

    def _gone(self) -> dict[int, str]:
        found = {}
        for other in self._others:
            beat = self._beats.get(other)
            if beat is not None and beat.left:
                found[other] = f"has left: {beat.left}"
            elif self._still[other].seconds > _MISSING:
                found[other] = f"has not been heard of for {self._still[other].seconds:.0f} s"
        return found

    # In the thread of its own

    def _live(self) -> None:
        due = time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):
                asked = self._questions.get(timeout=max(0.0, due - time.monotonic()))
                if asked is None:
                    self._line.close()
                    return
                question, reply = asked
                try:
                    reply.set_result(self._asked(question))
                except Exception as error:  # any error of a rendezvous backend
                    reply.set_exception(error)
            if time.monotonic() >= due:
                due = time.monotonic() + _BEAT
                self._beat()

    def _beat(self) -> None:
        """Write a beat and read the others'. After news do so again at once: whoever leaves waits until it is heard."""
        while self._beats_once():
            pass

    def _beats_once(self) -> bool:
        """Whether there is news."""
        self._number += 1
        with self._lock:
            knew = self._over or (f"{self._name} has left: {self._left}" if self._left else "")
            mine = _Beat(self._number, self._name, knew, self._left, self.waited)
        try:
            said = self._asked(lambda store: self._tell_and_hear(store, mine))
        except Exception:  # any error of a rendezvous backend: it is asked again a second later, if it may be
            return False
        with self._lock:
            self._unanswered.reset()
            for other in self._others:
                if other in said and said[other] != self._beats.get(other):
                    self._beats[other] = said[other]
                    self._still[other].reset()
                else:
                    self._still[other].look()
            self._over = self._over or next((beat.over for beat in said.values() if beat.over), "")
            return self._over != knew and not self._left

    def _tell_and_hear(self, store: Any, mine: _Beat) -> dict[int, _Beat]:
        """The beats of the others that have written one: `get` would wait for those that have not."""
        store.set(f"beat/{self._rank}", encode(mine))
        there = [other for other in self._others if other in self._beats or store.check([f"beat/{other}"])]
        keys = [f"beat/{other}" for other in there]
        at_once = keys and store.has_extended_api()  # one question in place of many
        texts = store.multi_get(keys) if at_once else [store.get(key) for key in keys]
        return {other: decode(text, _Beat) for other, text in zip(there, texts, strict=True)}

    def _asked(self, question: Callable[[Any], T]) -> T:
        self._broken = self._broken or self._line.broken()
        if self._broken:  # torch writes many lines to stderr at each further attempt
            raise HostsGone(self.store_is_gone)
        try:
            return question(self._store)
        except Exception as error:
            if connection_is_lost(error):
                self._broken = first_line(error)
                raise HostsGone(self.store_is_gone) from None
            raise
