"""The state machine of the tuning job without processes, sockets or threads: events by hand, and time that is set."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_worker import facts

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
    Tick,
    Worker,
)
from autoddp.attempts.job.hang_timeout import HangTimeout
from autoddp.attempts.job.journal import Journal
from autoddp.attempts.job.machine import JobMachine, State
from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.wire import VERSION, BlockDone, Finish, Goodbye, Hello, Measure, Message, Ready, StopTuning, Welcome

VARIABLES = {"GLOO_SOCKET_IFNAME": "eth0,eth1"}


class Rank(Worker):
    """A worker at the other end of no socket: it keeps what it is told."""

    def __init__(self, rank: int, built_ddp: bool = True) -> None:
        super().__init__(None, Hello(VERSION, rank, rank, 1000 + rank, 0, built_ddp))  # type: ignore[arg-type]
        self.told: list[Message] = []
        self.is_gone = self.was_hung_up = self.was_killed = False

    def send(self, message: Message) -> None:
        if self.is_gone:
            raise BrokenPipeError
        self.told.append(message)

    def hang_up(self) -> None:
        self.was_hung_up = True

    def kill(self) -> None:
        self.was_killed = True

    @property
    def may_go(self) -> bool:
        return Welcome(True) in self.told

    @property
    def orders(self) -> list[Measure]:
        return [message for message in self.told if isinstance(message, Measure)]


@dataclass
class Moved(HangTimeout):
    """Over when the test says so."""

    hangs: bool = False

    def is_over(self, began: float, seconds: float, ended: Collection[int] = ()) -> bool:
        return self.hangs

    def waited(self, ended: Collection[int] = ()) -> float:
        return 60.0 if self.hangs else 0.0


@dataclass
class Desk:
    """`journal` is a file; `nodes` is what the ranks say of the job."""

    journal: Path
    nodes: int = 1
    budget: float | None = 1e8
    now: float = 0.0
    ranks: dict[int, Rank] = field(default_factory=dict)
    """Of the present attempt."""

    def __post_init__(self) -> None:
        self.hang_timeout = Moved()
        deadline = Deadline(self.budget, clock=lambda: self.now)
        self.machine = JobMachine(Journal(self.journal), self.hang_timeout, deadline, lambda: self.now)
        self.number = -1
        self.asked = 0

    @property
    def state(self) -> State:
        return self.machine.state

    def happens(self, event: Event) -> None:
        self.machine.handle(event)

    # The main thread

    def begins(self) -> dict[str, str] | None:
        """The variables of the attempt that begins, which the study wants; None where there is none."""
        self.number += 1
        reply: Future[bool] = Future()
        variables = self.machine.wanted
        self.happens(AttemptBegins(self.number, self.journal.parent, variables, reply))
        self.ranks = {}
        return variables if reply.result(0) else None

    def ended(self, failure: str = "", blames_overlay: bool = False) -> Future[bool]:
        reply: Future[bool] = Future()
        self.happens(AttemptEnded(failure, blames_overlay, reply))
        return reply

    def ended_elsewhere(self, why: str = "it ended on another host") -> None:
        self.happens(EndedElsewhere(why))

    def gives_up(self, why: str = "given up") -> None:
        self.happens(GaveUp(why, Future()))

    def passes(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.happens(Tick())

    # The ranks

    def hello(self, rank: int, built_ddp: bool = True) -> Rank:
        worker = Rank(rank, built_ddp)
        self.ranks.setdefault(rank, worker)
        self.happens(Said(self.number, worker, worker.hello))
        return worker

    def says(self, rank: int, message: Message) -> None:
        self.happens(Said(self.number, self.ranks[rank], message))

    def ready_message(self, steps: int = 0) -> Ready:
        return Ready(facts(self.nodes), steps)

    def ready(self, rank: int = 0, steps: int = 0) -> None:
        self.says(rank, self.ready_message(steps))

    def block(self, index: int = 0, rank: int = 0) -> None:
        order = Measure(index, {}, 1, 3)
        self.says(rank, BlockDone(index, (0.05,) * 3, 0.05, 0.001, order))

    def goodbye(self, rank: int, reason: str = "", steps: int = 0, at: float = 0.0) -> None:
        self.says(rank, Goodbye(rank, reason, steps=steps, at=at))

    def finish(self, again: bool = False) -> None:
        self.says(1, Finish(again))

    def closed(self, rank: int) -> None:
        self.happens(Closed(self.number, self.ranks[rank]))

    def process_ended(self, rank: int, how: str) -> None:
        self.happens(RankEnded(self.number, 1000 + rank, how))

    def stop(self, overlay_is_to_blame: bool = False) -> None:
        self.happens(StopAsked(StopTuning("it sends mail", overlay_is_to_blame)))

    # The study

    def asks_facts(self) -> Future[Any]:
        reply: Future[Any] = Future()
        self.happens(FactsAsked(reply))
        return reply

    def asks(
        self,
        variables: dict[str, str] | None = None,
        steps: int = 40,
        apply: bool = True,
        reduce: bool = True,
        configuration: Configuration = AS_WRITTEN,
    ) -> Future[BlockDone]:
        reply: Future[BlockDone] = Future()
        asked = Measure(self.asked, configuration, 1, steps, reduce, apply)
        self.happens(MeasureAsked(asked, variables or {}, reply))
        self.asked += 1
        return reply

    def finishes(self) -> Future[None]:
        reply: Future[None] = Future()
        self.happens(FinishAsked(reply))
        return reply

    # Ways to each state

    def reach(self, state: State) -> None:
        """By the shortest way; the study has asked nothing yet but for MEASURING, LOST and BETWEEN."""
        self.begins()
        self.hello(0)
        self.hello(1)
        if state is State.STARTING:
            return
        self.ready()
        if state in (State.MEASURING, State.LOST):
            self.asks()
            if state is State.LOST:
                self.goodbye(1, "RuntimeError: of rank 1")
        elif state is State.OVER:
            self.gives_up()
        elif state is not State.READY:
            self.goodbye(1)
            if state is not State.LEAVING:
                self.ended()
                if state is not State.JUDGING:
                    self.asks()
        assert self.state is state
