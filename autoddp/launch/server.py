"""The launcher's end of the worker's socket: takes connections, sorts messages, and knows who is alive."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener

from autoddp.log import get_logger
from autoddp.wire import VERSION, Goodbye, Hello, Message, StopTuning, Welcome, decode, encode

logger = get_logger(__name__)


@dataclass
class Worker:
    """One connected worker process of this node."""

    connection: Connection
    hello: Hello
    said_goodbye: bool = False
    ended_by: threading.Event = field(default_factory=threading.Event)
    end: str = ""
    """How the process ended, where it did not say so itself: "killed by SIGABRT"."""

    def send(self, message: Message) -> None:
        """OSError if it is gone."""
        self.connection.send_bytes(encode(message))


@dataclass(frozen=True)
class Heard:
    """A message from a worker, or None when its connection closed."""

    worker: Worker
    message: Message | None


NOBODY = Worker(None, Hello(0, -1, -1, 0, 0))  # type: ignore[arg-type]
"""Whoever is no rank that has said hello."""


class WorkerServer:
    """Listens on a Unix socket that only this user can reach; `heard` holds whatever the workers say, in order."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.heard: queue.Queue[Heard] = queue.Queue()
        self.go = True
        """What the next Welcome says."""
        self.stopped = threading.Event()
        """Set once a process has said that tuning must stop."""
        self._listener = Listener(path, family="AF_UNIX")
        os.chmod(path, 0o600)
        self._closed = False
        self._connections: list[Connection] = []
        self._workers: dict[int, Worker] = {}
        threading.Thread(target=self._accept, name="autoddp-accept", daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._closed = True
        self._listener.close()

    def process_ended(self, pid: int, how: str) -> None:
        """The attempt tells how one of its processes has ended."""
        worker = self._workers.get(pid)
        if worker is not None:
            worker.end = how
            worker.ended_by.set()

    def dismiss(self) -> None:
        """Send every worker away, those that are here and those still to come."""
        self.go = False
        for connection in self._connections:
            with contextlib.suppress(OSError):
                socket.socket(fileno=os.dup(connection.fileno())).shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), name="autoddp-serve", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            hello = decode(connection.recv_bytes())
            if isinstance(hello, StopTuning):
                return self._stop_tuning(connection, hello)
            if not isinstance(hello, Hello) or hello.version != VERSION:
                raise ValueError(f"expected Hello of version {VERSION}, got {hello}")
        except (ValueError, EOFError, OSError) as error:
            logger.debug("a stranger on the socket: %s", error)
            return connection.close()
        worker = Worker(connection, hello)
        self._workers[hello.pid] = worker
        self.heard.put(Heard(worker, hello))
        try:
            worker.send(Welcome(self.go))
            while True:
                self._take(worker, decode(connection.recv_bytes()))
        except (EOFError, OSError):
            self.heard.put(Heard(worker, None))

    def _stop_tuning(self, connection: Connection, message: StopTuning) -> None:
        """A process of the script, which need not be a rank, is about to do what it must not do while tuning."""
        self.go = False
        self.stopped.set()
        self.heard.put(Heard(NOBODY, message))
        connection.send_bytes(encode(Welcome(False)))
        connection.close()

    def _take(self, worker: Worker, message: Message) -> None:
        worker.said_goodbye |= isinstance(message, Goodbye)
        self.heard.put(Heard(worker, message))
