"""The launcher's end of the worker's socket: takes connections, sorts messages, and knows who is alive."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener

from autoddp.log import get_logger
from autoddp.wire import VERSION, Goodbye, Hello, Message, Welcome, decode, encode

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


class WorkerServer:
    """Listens on a Unix socket that only this user can reach; `heard` holds whatever the workers say, in order."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.heard: queue.Queue[Heard] = queue.Queue()
        self.go = True
        """What the next Welcome says."""
        self._listener = Listener(path, family="AF_UNIX")
        os.chmod(path, 0o600)
        self._closed = False
        self._connections: list[Connection] = []
        threading.Thread(target=self._accept, name="autoddp-accept", daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._closed = True
        self._listener.close()

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
            if not isinstance(hello, Hello) or hello.version != VERSION:
                raise ValueError(f"expected Hello of version {VERSION}, got {hello}")
        except (ValueError, EOFError, OSError) as error:
            logger.debug("a stranger on the socket: %s", error)
            return connection.close()
        worker = Worker(connection, hello)
        threading.Thread(target=_watch_end, args=(worker,), name="autoddp-end", daemon=True).start()
        self.heard.put(Heard(worker, hello))
        try:
            worker.send(Welcome(self.go))
            while True:
                self._take(worker, decode(connection.recv_bytes()))
        except (EOFError, OSError):
            self.heard.put(Heard(worker, None))

    def _take(self, worker: Worker, message: Message) -> None:
        worker.said_goodbye |= isinstance(message, Goodbye)
        self.heard.put(Heard(worker, message))


def _watch_end(worker: Worker) -> None:
    """Wait for the process without reaping it: elastic is its parent's owner and reads the exit code after us."""
    try:
        result = os.waitid(os.P_PID, worker.hello.pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        result = None  # elastic was faster, or the process belongs to a wrapper
    if result is not None and result.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
        worker.end = f"killed by {signal.Signals(result.si_status).name}"
    elif result is not None:
        worker.end = f"ended with exit code {result.si_status}"
    worker.ended_by.set()
