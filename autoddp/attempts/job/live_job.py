"""The running tuning job as the study and the main thread use it: each request becomes an event in one queue.

One thread takes the events and runs the state machine (`machine`), which alone writes the job's state. The study's
thread and the main thread put an event and wait for its reply; the threads of the workers' socket only put events.

The socket is in a folder that only this user can enter, and the kernel says of each peer which user it is. Whatever
else comes than messages of the protocol, or half of one, ends that connection and nothing more.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypeVar

from autoddp.attempts.job.deadline import Deadline
from autoddp.attempts.job.events import (
    AttemptBegins,
    AttemptEnded,
    Closed,
    EndedElsewhere,
    Event,
    FactsAsked,
    FinishAsked,
    GaveUp,
    MeasureAsked,
    RankEnded,
    Said,
    StopAsked,
    TakenOver,
    Tick,
    Worker,
    shut_down,
)
from autoddp.attempts.job.hang_timeout import HangTimeout
from autoddp.attempts.job.journal import Journal
from autoddp.attempts.job.machine import JobMachine
from autoddp.knobs import Configuration
from autoddp.log import get_logger
from autoddp.recipe import merged
from autoddp.wire import (
    AS_IT_IS,
    LARGEST,
    VERSION,
    BlockDone,
    Entry,
    Experiment,
    Hello,
    JobFacts,
    Measure,
    StopTuning,
    Welcome,
    decode,
    encode,
)

logger = get_logger(__name__)

_TICK = 0.5  # seconds between two looks at the limits in time
_PASSING = 10  # seconds in which a worker must take a message: a stopped worker must not block the launcher
_REST = 30  # seconds without a byte in which a worker must go on with a message that it has begun
_FIRST = 2**20  # bytes: StopTuning may name some paths
_AT_ONCE = 1024  # connections: far more than a host has ranks; further ones are closed
_BREATH = 0.05  # seconds before the next try where a connection could not be taken: files or threads are used up
_CLOSING = 1.0  # seconds that connections have to close by themselves once the attempt has ended

T = TypeVar("T")


class LiveJob:
    """Implements `study.Measure` for the study's thread; the main thread reports the attempts that it makes.

    `path` is that of the workers' socket, which is there during an attempt. After `close()` nothing may be asked.
    `waited_elsewhere`: see `HangTimeout.elsewhere`.
    """

    def __init__(
        self,
        path: str,
        journal: Journal,
        deadline: Deadline | None = None,
        waited_elsewhere: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._path = path
        self._next = 0
        self.inputs: tuple[str, ...] = ()
        """What the models were called with in all measurements, see `recipe.inputs`; the study's thread writes it."""
        self._number = -1
        self._server: WorkerServer | None = None
        self.machine = JobMachine(journal, HangTimeout(elsewhere=waited_elsewhere), deadline)
        """What is known of the job: any thread may read its attributes, and none may call its methods."""
        self._events: queue.Queue[Event | None] = queue.Queue()
        self._owner = threading.Thread(target=self._own, name="autoddp-job", daemon=True)
        self._owner.start()

    def _own(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=_TICK)
            except queue.Empty:
                event = Tick()
            if event is None:
                return
            try:
                self.machine.handle(event)
            except Exception as error:
                logger.exception("a fault of autoddp's own")
                self.machine.broke(f"a fault of autoddp's own: {error!r}")
                reply: Future[object] | None = getattr(event, "reply", None)
                if reply is not None and not reply.done():
                    reply.set_exception(error)

    def _ask(self, event: Event, reply: Future[T]) -> T:
        """Put an event and wait for its reply, which always comes: see `machine`."""
        assert self._owner.is_alive(), "closed"
        self._events.put(event)
        return reply.result()

    # Called by the main thread

    def attempt_begins(self, number: int, heartbeats: Path, variables: Mapping[str, str]) -> bool:
        """Another start of the script is about to be made, with these variables. False: tuning is over, make none."""
        reply: Future[bool] = Future()
        makes_sense = self._ask(AttemptBegins(number, heartbeats, variables, reply), reply)
        if makes_sense:
            self._number = number
            self._server = WorkerServer(self._path, number, self._events.put)
        return makes_sense

    def rank_ended(self, pid: int, how: str) -> None:
        """How one of the attempt's processes has ended, see `RankEnded`."""
        self._events.put(RankEnded(self._number, pid, how))

    def ended_elsewhere(self, why: str) -> None:
        """The attempt has ended on another host."""
        self._events.put(EndedElsewhere(why))

    def attempt_ended(self, failure: str, blames_overlay: bool = False) -> bool:
        """Every process of the attempt is gone. Whether another one makes sense; see `AttemptEnded`."""
        self._close_server()
        reply: Future[bool] = Future()
        return self._ask(AttemptEnded(failure, blames_overlay, reply), reply)

    def close(self) -> None:
        """Tuning is over, if it was not; the study has ended."""
        self.give_up("the launcher ends")
        self._close_server()
        self._events.put(None)
        self._owner.join()

    def _close_server(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            server.close()

    # Called by any thread

    def give_up(self, why: str) -> None:
        """Stop tuning: the workers of this node leave, the study gets TuningOver. Without effect if it is over."""
        reply: Future[None] = Future()
        self._ask(GaveUp(why, reply), reply)

    # Called by the study's thread

    def facts(self) -> JobFacts:
        """Wait until the job is ready; TuningOver if it never is."""
        reply: Future[JobFacts] = Future()
        return self._ask(FactsAsked(reply), reply)

    def take_over(self, entries: Sequence[Entry]) -> None:
        """Answer from these measurements as long as the study asks for the same. Comes before its first question."""
        reply: Future[None] = Future()
        self._ask(TakenOver(entries, reply), reply)

    def __call__(
        self,
        configuration: Configuration,
        warmup: int,
        steps: int,
        *,
        reduce: bool = True,
        apply: bool = True,
        compare: int = 0,
        anatomy: bool = False,
        experiment: Experiment = AS_IT_IS,
        timeline: int = 0,
    ) -> BlockDone:
        """See `study.Measure`."""
        index, self._next = self._next, self._next + 1
        at_once = configuration.steps_per_update
        asked = Measure(
            index,
            configuration,
            warmup,
            steps,
            reduce=reduce,
            apply=apply,
            compare=compare,
            at_once=at_once,
            anatomy=anatomy,
            experiment=experiment,
            timeline=timeline,
        )
        reply: Future[BlockDone] = Future()
        done = self._ask(MeasureAsked(asked, configuration.start_variables, reply), reply)
        self.inputs = merged(self.inputs, done.inputs)
        return done

    def finish(self) -> None:
        """Tell all ranks to leave, on every host. May raise TuningOver."""
        reply: Future[None] = Future()
        self._ask(FinishAsked(reply), reply)


class WorkerServer:
    """Listens during attempt number `attempt` on a Unix socket that only this user can reach.

    `put` gets the events of each connection in their order.
    """

    def __init__(self, path: str, attempt: int, put: Callable[[Said | Closed | StopAsked], None]) -> None:
        self._path = path
        self._attempt = attempt
        self._put = put
        self._serving: dict[threading.Thread, Connection] = {}
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(path)
        os.chmod(path, 0o600)
        self._socket.listen()
        self._closing, self._told_to_close = socket.socketpair()
        self._accepting = threading.Thread(target=self._accept, name="autoddp-accept", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Accept no more connections and end those that are open. On return every event has been put."""
        self._closing.close()
        self._accepting.join()
        self._told_to_close.close()
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):  # the run's folder may have been removed
            os.unlink(self._path)
        until = time.monotonic() + _CLOSING
        for thread in self._serving:
            thread.join(max(0.0, until - time.monotonic()))
        for connection in self._serving.values():
            shut_down(connection)
        for thread in self._serving:
            thread.join()

    def _accept(self) -> None:
        while True:
            ready = wait([self._socket, self._told_to_close])
            if self._socket not in ready:  # connections that were made before the end are still served
                return
            try:
                accepted, _ = self._socket.accept()
                self._take(accepted)
            except (OSError, RuntimeError) as error:  # the latter where no thread can be started
                logger.debug("a connection that could not be taken: %s", error)
                time.sleep(_BREATH)

    def _take(self, accepted: socket.socket) -> None:
        self._forget_those_that_ended()
        if len(self._serving) >= _AT_ONCE or not _is_this_user(accepted):
            logger.debug("a stranger on the socket, or too many connections")
            accepted.close()
            return
        for direction, limit in ((socket.SO_SNDTIMEO, _PASSING), (socket.SO_RCVTIMEO, _REST)):
            accepted.setsockopt(socket.SOL_SOCKET, direction, struct.pack("ll", limit, 0))
        connection = Connection(accepted.detach())
        thread = threading.Thread(target=self._serve, args=(connection,), name="autoddp-serve", daemon=True)
        thread.start()
        self._serving[thread] = connection

    def _forget_those_that_ended(self) -> None:
        """A connection closes when nobody knows it any more."""
        self._serving = {thread: one for thread, one in self._serving.items() if thread.is_alive()}

    def _serve(self, connection: Connection) -> None:
        try:
            if not connection.poll(_REST):
                raise ValueError("it says nothing")
            first = decode(connection.recv_bytes(_FIRST))
            if isinstance(first, StopTuning):
                self._put(StopAsked(first))
                connection.send_bytes(encode(Welcome(False)))
                return
            if not isinstance(first, Hello):
                raise ValueError(f"expected Hello, got {type(first).__name__}")
            if first.version != VERSION:
                logger.warning(
                    "rank %d is sent away: it speaks version %d of the tuning protocol, and this launcher version %d; "
                    "let both use one installation of autoddp",
                    *(first.rank, first.version, VERSION),
                )
                raise ValueError("another version")
        except (ValueError, EOFError, OSError) as error:
            logger.debug("a stranger on the socket: %s", error)
            return shut_down(connection)
        worker = Worker(connection, first)
        self._put(Said(self._attempt, worker, first))
        try:
            while True:
                connection.poll(None)
                self._put(Said(self._attempt, worker, decode(connection.recv_bytes(LARGEST))))
        except (ValueError, EOFError, OSError) as error:
            logger.debug("rank %d has gone: %r", first.rank, error)
            shut_down(connection)
            self._put(Closed(self._attempt, worker))


def _is_this_user(accepted: socket.socket) -> bool:
    """Whether the peer runs as this user. True where the system does not tell: the folder keeps others out as well."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, uid, _ = struct.unpack("3i", accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(uid == os.geteuid())
