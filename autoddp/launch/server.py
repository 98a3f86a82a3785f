"""The launcher's end of the workers' socket in one attempt: it accepts connections and turns messages into events.

The socket is in a folder that only this user can enter, and the kernel says of each peer which user it is. Whatever
else comes than messages of the protocol, or half of one, ends that connection and nothing more.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from autoddp.log import get_logger
from autoddp.wire import LARGEST, VERSION, Hello, Message, StopTuning, Welcome, decode, encode

logger = get_logger(__name__)

_PASSING = 10  # seconds in which a worker must take a message: a stopped worker must not block the launcher
_REST = 30  # seconds without a byte in which a worker must go on with a message that it has begun
_FIRST = 2**20  # bytes: StopTuning may name some paths
_AT_ONCE = 1024  # connections: far more than a host has ranks; further ones are closed
_BREATH = 0.05  # seconds before the next try where a connection could not be taken: all descriptors may be in use
_CLOSING = 1.0  # seconds that connections have to close by themselves once the attempt has ended


@dataclass(eq=False)
class Worker:
    """One connected worker process of this node. Only the state machine of the job writes it."""

    connection: Connection
    hello: Hello
    said_goodbye: bool = False
    end: str = ""
    """How the process ended, where that is known: "killed by SIGABRT"."""

    def send(self, message: Message) -> None:
        """OSError if the worker is gone, or does not take the message in time; the connection then closes."""
        try:
            self.connection.send_bytes(encode(message))
        except OSError:
            self.hang_up()
            raise

    def hang_up(self) -> None:
        """Shut the connection down. What the worker has said before still arrives, then `Closed`."""
        _shut_down(self.connection)

    def kill(self) -> None:
        """SIGKILL to the process, if it is still there."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.hello.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Said:
    """A worker of attempt number `attempt` has said `message`; the first one is Hello, which a Welcome answers."""

    attempt: int
    worker: Worker
    message: Message


@dataclass(frozen=True)
class Closed:
    """The connection of a worker has closed; the last event of this worker."""

    attempt: int
    worker: Worker


@dataclass(frozen=True)
class StopAsked:
    """A process of the script, which need not be a rank, is about to do what it must not do while tuning."""

    message: StopTuning


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
            _shut_down(connection)
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
            except OSError as error:
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
        self._serving[thread] = connection
        thread.start()

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
            return _shut_down(connection)
        worker = Worker(connection, first)
        self._put(Said(self._attempt, worker, first))
        try:
            while True:
                connection.poll(None)
                self._put(Said(self._attempt, worker, decode(connection.recv_bytes(LARGEST))))
        except (ValueError, EOFError, OSError) as error:
            logger.debug("rank %d has gone: %r", first.rank, error)
            _shut_down(connection)
            self._put(Closed(self._attempt, worker))


def _is_this_user(accepted: socket.socket) -> bool:
    """Whether the peer runs as this user. True where the system does not tell: the folder keeps others out as well."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, uid, _ = struct.unpack("3i", accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(uid == os.geteuid())


def _shut_down(connection: Connection) -> None:
    """End both directions. The descriptor stays open as long as the object lives, so that its number is not reused."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)
