"""The worker's end of the private socket to its node's launcher."""

from __future__ import annotations

import contextlib
import os
from multiprocessing.connection import Client, Connection

from autoddp.wire import (
    LARGEST,
    VERSION,
    BlockDone,
    Finish,
    Goodbye,
    Hello,
    JobFacts,
    Message,
    Ready,
    Welcome,
    decode,
    encode,
)
from autoddp.worker.worker_exit import leave


class Link:
    """One connection per worker process, made when there is something to say.

    `OSError` or `EOFError` where the launcher has ended.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._pid = os.getpid()
        self._said_goodbye = False
        self._connection: Connection | None = None
        self._welcome = False

    @property
    def rank(self) -> int:
        """This process among all of the job."""
        return int(os.environ["RANK"])

    @property
    def local_rank(self) -> int:
        """This process among those of its node."""
        return int(os.environ["LOCAL_RANK"])

    def hello(self) -> bool:
        """Introduce this process, once. Whether the launcher wants tuning to go on."""
        if self._connection is None:
            restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
            try:
                self._connection = Client(self._path, family="AF_UNIX")
                self.send(Hello(VERSION, self.rank, self.local_rank, os.getpid(), restart))
                answer = self.receive()
            except (EOFError, OSError):
                return False
            self._welcome = isinstance(answer, Welcome) and answer.go
        return self._welcome

    def send(self, message: Message) -> None:
        """Send one message."""
        assert self._connection is not None, "hello comes first"
        self._connection.send_bytes(encode(message))

    def receive(self) -> Message:
        """Wait for one message."""
        assert self._connection is not None, "hello comes first"
        return decode(self._connection.recv_bytes(LARGEST))

    def goodbye(self, reason: str) -> None:
        """Say once why this process leaves. Forked children say nothing, nor does one that ends well before `hello`."""
        if self._said_goodbye or os.getpid() != self._pid or "RANK" not in os.environ:
            return
        if self._connection is None and not reason:
            return
        self._said_goodbye = True
        with contextlib.suppress(OSError):  # the launcher has ended first
            if self.hello():
                self.send(Goodbye(self.rank, reason))


class LauncherDirector:
    """Gets orders from the study in the launcher. Local rank 0 of every other node reports to its own launcher."""

    def __init__(self, link: Link, facts: JobFacts) -> None:
        self._link = link
        self._facts = facts
        self._reports = link.local_rank == 0 and link.rank != 0
        if self._reports:
            link.send(Ready(facts))

    def next(self, done: BlockDone | None) -> Message:
        """See `runner.Director`. Where the launcher has ended, all ranks leave."""
        try:
            self._link.send(Ready(self._facts) if done is None else done)
            return self._link.receive()
        except (EOFError, OSError):
            return Finish(recipe="")

    def heard(self, done: BlockDone) -> None:
        """See `runner.Director`."""
        if self._reports:
            self._link.send(done)

    def finish(self, order: Finish) -> None:
        """See `runner.Director`."""
        if self._reports:
            self._link.send(order)
        leave()
