"""The messages between the workers of a tuning job and their node's launcher, and the worker's end of the socket.

A trial is a call: `Measure` goes to rank 0, `BlockDone` comes back.

    worker → launcher    Hello (every local rank), Ready, BlockDone (local rank 0), Goodbye (whoever leaves),
                         StopTuning (any process of the script)
    launcher → worker    Welcome (answers Hello), Measure, Finish

A message is one JSON object with its name under "is". Whatever else comes over the socket is a ValueError: an unknown
name, a missing or a surplus field, a value of another type. Both ends come from one installation, so that is a fault of
ours or a stranger on the socket.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import time
from multiprocessing.connection import Connection
from typing import Annotated, Any

from autoddp import codec
from autoddp.codec import Meta, Struct
from autoddp.isolation.stopping import connected
from autoddp.knobs import Configuration, GradientError
from autoddp.timing.anatomy import RankSteps
from autoddp.timing.timeline import Timeline
from autoddp.wire.experiment import AS_IT_IS, Experiment
from autoddp.wire.job_facts import JobFacts
from autoddp.wire.started_with import local_rank, started_with

_Count = Annotated[int, Meta(ge=0)]
_Process = Annotated[int, Meta(gt=0)]
"""The id of one process: the launcher may send it a signal, and 0 and negative numbers would mean many."""
VERSION = 9
"""Version of all messages. The fields of `Hello` without a default are the same in every version, and usually it has no
others: so the other end's can be told."""
LARGEST = 64 * 2**20
"""Bytes; neither end reads a longer message. The longest has a journal in `Measure.missed`: some MiB."""


class Message(Struct, frozen=True, forbid_unknown_fields=True, tag_field="is", tag=True):
    """What all messages have in common."""


class Hello(Message, frozen=True, omit_defaults=True):
    """A worker process builds its first DDP model, or ends with an exception before it has built one; see `Goodbye`."""

    version: int
    """`VERSION` of the worker; the launcher talks to no other than its own."""
    rank: _Count
    local_rank: _Count
    pid: _Process
    restart: _Count
    """How often elastic has restarted the group: TORCHELASTIC_RESTART_COUNT."""
    built_ddp: bool = True
    """Whether the worker has built a DDP model. Else it is about to say by which exception it ends."""


class Welcome(Message, frozen=True):
    """`go` is False when tuning cannot go on: the worker then leaves at once with exit code 0."""

    go: bool


class Ready(Message, frozen=True):
    """The first step boundaries have passed; trials may begin."""

    facts: JobFacts
    steps: _Count = 0
    """Steps of the script that have passed."""


class Start(Struct, frozen=True, forbid_unknown_fields=True):
    """What the launcher that gives an order knows of the present start of the script, and of those before."""

    number: int = 0
    """Times of two blocks are compared only where both come from one start."""
    seconds: float = 0.0
    """Seconds from the beginning of a start until it could measure."""
    steps: int = 0
    """Steps that the script makes before it can be measured."""
    length: int | None = None
    """Steps of the script, from a start that has ended by itself, the shortest of them; None as long as none has."""
    spent: float = 0.0
    """Seconds of tuning before the order."""
    limits: bool = False
    """Whether tuning ends with the script, at a time that nobody knows yet."""

    @property
    def usable(self) -> int | None:
        """Steps of one start that can be measured, as far as that is known."""
        return None if self.length is None else max(0, self.length - self.steps)


class Measure(Message, frozen=True):
    """Apply `configuration`, let `warmup` steps pass, then time `steps` steps; see `at_once` for what a step is."""

    index: int
    """Position in the journal, the same on every node."""
    configuration: Configuration
    warmup: int
    steps: int
    reduce: bool = True
    """False: with DDP's reduction switched off, for the headroom."""
    apply: bool = True
    """False: the configuration is in effect already and need not be applied."""
    compare: int = 0
    """Steps after the timed ones, on which the gradients also travel whole: how far is the hook from the exact mean?"""
    at_once: int = 1
    """Steps of the script that the configuration makes one: that many are counted, and timed, as one."""
    left: float | None = None
    """Seconds that tuning may still take, by the clock of the launcher that asks; None: the limit is not known yet."""
    anatomy: bool = False
    """Whether the stages of each timed step are recorded on each rank."""
    experiment: Experiment = AS_IT_IS
    """What else is different in this block."""
    timeline: int = 0
    """Steps at the end of the block, after all others, of which each rank records a `Timeline`."""
    start: Start = Start()
    missed: tuple[Entry, ...] = ()
    """After another start: journal entries before this one that other nodes may lack; see `attempts.job.journal`."""


class BlockDone(Message, frozen=True):
    """Seconds of each measured step (mean over ranks), and of the warm-up before them, in all."""

    index: int
    seconds: tuple[float, ...]
    warmup_seconds: float
    apply_seconds: float
    """Seconds in which rank 0 applied the configuration and switched the reduction on or off, between two steps.

    What follows from it later is no part of it: the first steps under the configuration are warm-up.
    """
    measure: Measure | None = None
    """The `Measure` it answers, so that every node's launcher can keep the journal; None in the journal."""
    error: GradientError | None = None
    """Error of the gradients over the steps compared, where the configuration has a hook of ours."""
    compilations: int = 0
    """How often torch.compile was at work on rank 0, from applying the configuration on."""
    left: float | None = None
    """`Measure.left` of the order, which the launcher puts here."""
    start: Start = Start()
    """`Measure.start` of the order, which the launcher puts here."""
    made: _Count = 0
    """Steps of the script in this start so far."""
    queued: _Count = 0
    """Batches that may wait in the queues of the loaders of rank 0: so many come faster than they are loaded."""
    slowest: tuple[float, ...] = ()
    """Seconds of each measured step on the rank that was slowest in it: where ranks run free, means hide a slow one."""
    inputs: tuple[str, ...] = ()
    """What the models have been called with since the start, on all ranks, see `recipe.inputs`."""
    ranks: tuple[RankSteps, ...] = ()
    """The steps of each rank by itself, where `Measure.anatomy` asked for them."""
    timelines: tuple[Timeline, ...] = ()
    """Timelines of all ranks, where `Measure.timeline` asked for them; they may have fewer steps than it asked for."""


class Entry(Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of the journal: what was asked, and what came of it, a block or the reason of a failure."""

    asked: Measure
    done: BlockDone | None
    failure: str = ""


class Finish(Message, frozen=True):
    """The study is over: every rank leaves with exit code 0."""

    again: bool = False
    """True: this start is over, the study is not. Another start follows, with other variables."""


class Goodbye(Message, frozen=True):
    """A worker leaves before the study is over: with an exception's text, or "" when its script simply ended."""

    rank: int
    reason: str
    steps: _Count = 0
    """Steps of the script that the worker has seen."""
    at: float = 0.0
    """When it left, by a clock that all processes of a host share: messages may be read in another order."""


class StopTuning(Message, frozen=True):
    """A process of the script is about to do what would outlast the tuning run, or what cannot be measured.

    `reason` names it for the user.

    It may be the first and only message on a connection: the process need not be a rank. The answer is a `Welcome`.
    """

    reason: str
    overlay_is_to_blame: bool = False
    """True: it failed only because of the overlay; another attempt under guard makes sense."""


_ANY: Any = functools.reduce(operator.or_, Message.__subclasses__())


def encode(message: Message) -> bytes:
    """One message as UTF-8 JSON."""
    return codec.encode(message).encode()


def decode(data: bytes) -> Message:
    """The message back; ValueError for anything that is not one."""
    try:
        message: Message = codec.decode(data, _ANY)
    except ValueError as error:
        raise ValueError(f"not a message of this protocol: {error}") from error
    return message


class LauncherClient:
    """The worker's end of the socket: one connection per worker process, made when there is something to say.

    `OSError` or `EOFError` where the launcher has ended.
    """

    def __init__(self, path: str) -> None:
        self.steps = 0
        """Steps of the script so far; whoever counts them adds to it."""
        self.why_unheard = ""
        """Why the launcher could not be reached, where it could not."""
        self._path = path
        self._pid = os.getpid()
        self._said_goodbye = False
        self._connection: Connection | None = None
        self._welcome = False

    @property
    def rank(self) -> int:
        """Rank of this process among all of the job."""
        return int(started_with("RANK"))

    @property
    def local_rank(self) -> int:
        """Rank of this process among those of its node."""
        return local_rank()

    def hello(self, built_ddp: bool = True) -> bool:
        """Introduce this process, once, as `Hello` has it. Whether the launcher wants tuning to go on."""
        if self._connection is None:
            restart = int(started_with("TORCHELASTIC_RESTART_COUNT", "0"))
            try:
                self._connection = connected(self._path)
                self.send(Hello(VERSION, self.rank, self.local_rank, os.getpid(), restart, built_ddp))
                answer = self.receive()
            except (EOFError, OSError) as error:
                self.why_unheard = repr(error)
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
        if self._said_goodbye or os.getpid() != self._pid or not started_with("RANK", ""):
            return
        if self._connection is None and not reason:
            return
        self._said_goodbye = True
        with contextlib.suppress(OSError):  # the launcher has ended first
            if self.hello(built_ddp=False):
                self.send(Goodbye(self.rank, reason, self.steps, time.monotonic()))
