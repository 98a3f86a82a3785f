"""A worker that speaks the wire protocol over the launcher's socket from a thread, in the name of a real process."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Client, Connection

from autoddp.knobs import BY_NAME
from autoddp.wire import VERSION, BlockDone, Finish, Goodbye, Hello, JobFacts, Measure, Ready, decode, encode

Answer = Callable[[Measure], BlockDone | None]


def facts(nodes: int = 1) -> JobFacts:
    return JobFacts(2, nodes, "gloo", ("cpu",), "2.13.0", 24 << 20, "0123456789abcdef", {}, tuple(BY_NAME))


def cost(order: Measure) -> BlockDone:
    """No noise: what is asked decides what comes back."""
    second = 0.05 if order.reduce else 0.03
    second *= {"bf16": 0.8, "fp16": 0.85, "powersgd": 0.7}.get(str(order.configuration.get("hook")), 1.0)
    second -= 0.001 * len(order.configuration)
    return BlockDone(order.index, (second,) * order.steps, second * order.warmup, 0.001, asdict(order))


class FakeWorker:
    """A rank on the socket. `answer` gives a block for an order, or None: then its process is killed.

    `told` is what an attempt calls when one of its processes has ended, `WorkerServer.process_ended`.
    """

    def __init__(
        self,
        path: str,
        answer: Answer = cost,
        rank: int = 0,
        nodes: int = 1,
        restart: int = 0,
        told: Callable[[int, str], None] = lambda pid, how: None,
    ) -> None:
        self._told = told
        self.process = subprocess.Popen(["sleep", "100"])
        self.heard: list[Measure | Finish] = []
        self.connection: Connection = Client(path, family="AF_UNIX")
        self.hung_up = threading.Event()
        self._answer = answer
        self.say(Hello(VERSION, rank, rank, self.process.pid, restart))
        self.welcome = decode(self.connection.recv_bytes())
        self.say(Ready(facts(nodes)))
        threading.Thread(target=self._serve, daemon=True).start()

    def say(self, message: Hello | Ready | BlockDone | Goodbye) -> None:
        self.connection.send_bytes(encode(message))

    def _serve(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while not self.connection.closed:
                order = decode(self.connection.recv_bytes())
                assert isinstance(order, (Measure, Finish))
                self.heard.append(order)
                done = self._answer(order) if isinstance(order, Measure) else None
                if done is not None:
                    self.say(done)
                elif isinstance(order, Measure):
                    self.end()
        self.hung_up.set()

    def end(self, reason: str | None = None) -> None:
        """Say goodbye with the reason, or be killed."""
        if reason is not None:
            self.say(Goodbye(0, reason))
        self.process.kill()
        self.process.wait()
        self._told(self.process.pid, "killed by SIGKILL")
        self.connection.close()
