"""A worker that speaks the wire protocol over the launcher's socket from a thread, in the name of a real process."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path

from autoddp.attempts.job.live_job import LiveJob
from autoddp.knobs import BY_NAME
from autoddp.wire import VERSION, BlockDone, Finish, Goodbye, Hello, JobFacts, Measure, Ready, Welcome, decode, encode

Answer = Callable[[Measure], BlockDone | Goodbye | None]


def facts(nodes: int = 1) -> JobFacts:
    knobs = tuple(name for name in BY_NAME if name != "defer_reductions")  # its steps have one micro-batch each
    return JobFacts(2, nodes, "gloo", ("cpu",), "2.13.0", 24 << 20, "0123456789abcdef", {}, knobs)


def cost(order: Measure) -> BlockDone:
    """No noise: what is asked decides what comes back."""
    second = 0.05 if order.reduce else 0.03
    second *= {"bf16": 0.8, "fp16": 0.85, "powersgd": 0.7}.get(str(order.configuration.get("hook")), 1.0)
    second -= 0.001 * len(order.configuration)
    return BlockDone(order.index, (second,) * order.steps, second * order.warmup, 0.001, order)


class FakeWorker:
    """A rank on the socket. `answer` gives a block for an order, or the worker's last word, or None.

    After the last two its process is killed.

    `told` is what an attempt calls when one of its processes has ended, `LiveJob.rank_ended`. Like a real rank it
    leaves when it is told to finish or when the launcher hangs up: `left` is set then.
    """

    def __init__(
        self,
        path: str,
        answer: Answer = cost,
        rank: int = 0,
        nodes: int = 1,
        told: Callable[[int, str], None] = lambda pid, how: None,
    ) -> None:
        self._told = told
        self.process = subprocess.Popen(["sleep", "100"])
        self.heard: list[Measure | Finish] = []
        self.connection: Connection = Client(path, family="AF_UNIX")
        self.left = threading.Event()
        self.failed = True
        """Unless it says goodbye without a reason."""
        self._answer = answer
        self.say(Hello(VERSION, rank, rank, self.process.pid, 0))
        self.welcome = decode(self.connection.recv_bytes())
        if self.welcome == Welcome(True):
            with contextlib.suppress(OSError):  # the launcher may hang up at any moment
                self.say(Ready(facts(nodes)))
            threading.Thread(target=self._serve, daemon=True).start()
        else:
            self.left.set()

    def say(self, message: Hello | Ready | BlockDone | Goodbye) -> None:
        self.failed = message != Goodbye(0, "")
        self.connection.send_bytes(encode(message))

    def _serve(self) -> None:
        with contextlib.suppress(EOFError, OSError):  # as above
            while not self.connection.closed:
                order = decode(self.connection.recv_bytes())
                assert isinstance(order, (Measure, Finish))
                self.heard.append(order)
                if isinstance(order, Finish):
                    self.failed = False
                    break
                answer = self._answer(order)
                if answer is not None:
                    self.say(answer)
                if not isinstance(answer, BlockDone):
                    self.end()
        self.left.set()

    def end(self, reason: str | None = None) -> None:
        """Say goodbye with the reason, or be killed."""
        if reason is not None:
            self.say(Goodbye(0, reason))
        self.process.kill()
        self.process.wait()
        self._told(self.process.pid, "killed by SIGKILL")
        self.connection.close()


class MainThread:
    """The launcher's main thread without its processes: a fake worker an attempt, as long as the job wants another.

    `answers` are of the attempts, in order; the last one is that of all further attempts.
    """

    def __init__(self, job: LiveJob, path: str, folder: Path, answers: Sequence[Answer] = (cost,), nodes: int = 1):
        self.variables: list[dict[str, str]] = []
        self.workers: list[FakeWorker] = []
        self._job, self._path, self._folder, self._nodes = job, path, folder, nodes
        self._answers = list(answers)
        self._ended = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        more, number = True, 0
        while more:
            variables = self._job.machine.wanted
            if not self._job.attempt_begins(number, self._folder, variables):
                break
            self.variables.append(variables)
            answer = self._answers[min(number, len(self._answers) - 1)]
            worker = FakeWorker(self._path, answer, nodes=self._nodes, told=self._job.rank_ended)
            self.workers.append(worker)
            assert worker.left.wait(60)
            if not worker.connection.closed:
                worker.end()
            more = self._job.attempt_ended("rank 0 ended with exit code 1" if worker.failed else "")
            number += 1

    def end(self) -> None:
        """Tuning is over, if it was not. May be called again."""
        if self._ended:
            return
        self._ended = True
        self._job.give_up("the test is over")
        self.thread.join(60)
        assert not self.thread.is_alive()
        self._job.close()
