"""What can happen to a job that is being tuned, one class an event, and the workers that it happens to.

Whoever asks for something puts an event with a `reply`, and waits at it. `machine` decides what follows.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from autoddp.processes.children import ENDED_WELL, kill_if_below
from autoddp.wire import BlockDone, Entry, Hello, JobFacts, Measure, Message, StopTuning, encode


@dataclass(eq=False)
class Worker:
    """One connected worker process of this node. Only the state machine of the job writes it."""

    connection: Connection
    hello: Hello
    said_goodbye: bool = False
    end: str = ""
    """How the process ended, where that is known: "killed by SIGABRT"."""

    @property
    def left_by_a_code(self) -> bool:
        """Whether the process has ended by itself, with another exit code than 0."""
        return self.end.startswith("ended ") and self.end != ENDED_WELL

    def has_ended_well(self, if_not_known: bool) -> bool:
        """Whether the process has ended with exit code 0."""
        return self.end == ENDED_WELL if self.end else if_not_known

    def send(self, message: Message) -> None:
        """OSError if the worker is gone, or does not take the message in time; the connection then closes."""
        try:
            self.connection.send_bytes(encode(message))
        except OSError:
            self.hang_up()
            raise

    def hang_up(self) -> None:
        """Shut the connection down. What the worker has said before still arrives, then `Closed`."""
        shut_down(self.connection)

    def kill(self) -> None:
        """SIGKILL to the process, if it is still there, and one that this launcher has started.

        The worker itself has told its number. In a PID namespace of its own that is another process's here, and so it
        may be some time after the worker has ended.
        """
        kill_if_below(self.hello.pid)


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


def shut_down(connection: Connection) -> None:
    """End both directions. The descriptor stays open as long as the object lives, so that its number is not reused."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class FactsAsked:
    """The study waits for the job's facts."""

    reply: Future[JobFacts]


@dataclass(frozen=True)
class MeasureAsked:
    """The study wants a measurement, by a start with these variables. The reply may be TrialFailed."""

    asked: Measure
    variables: Mapping[str, str]
    reply: Future[BlockDone]


@dataclass(frozen=True)
class FinishAsked:
    """The study is over: every rank of every host is told."""

    reply: Future[None]


@dataclass(frozen=True)
class GaveUp:
    """Tuning cannot go on."""

    why: str
    reply: Future[None]


@dataclass(frozen=True)
class TakenOver:
    """A study that was cut off goes on: these are its measurements, which the study will ask for again."""

    entries: Sequence[Entry]
    reply: Future[None]


@dataclass(frozen=True)
class AttemptBegins:
    """The script is about to be started again, with these variables. The reply says whether that makes sense."""

    number: int
    heartbeats: Path
    variables: Mapping[str, str]
    reply: Future[bool]


@dataclass(frozen=True)
class AttemptEnded:
    """Every process of the attempt is gone, and every other event of it was put before. The reply: another one?"""

    failure: str
    """"" or why the attempt has failed."""
    blames_overlay: bool
    """Whether a script that never comes to a measurement may do so without the overlay: then tuning is not over."""
    reply: Future[bool]


@dataclass(frozen=True)
class EndedElsewhere:
    """The attempt has ended on another host."""

    why: str


@dataclass(frozen=True)
class RankEnded:
    """The process of a rank has ended."""

    attempt: int
    pid: int
    how: str
    """"killed by SIGABRT" or "ended with exit code 1"."""


@dataclass(frozen=True)
class Tick:
    """Some time has passed."""


Question = FactsAsked | MeasureAsked | FinishAsked
Event = (
    Question
    | GaveUp
    | TakenOver
    | AttemptBegins
    | AttemptEnded
    | EndedElsewhere
    | RankEnded
    | Said
    | Closed
    | StopAsked
    | Tick
)
