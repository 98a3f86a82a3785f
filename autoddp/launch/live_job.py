"""The running tuning job as the study and the main thread use it: each request becomes an event in one queue.

One thread takes the events and runs the state machine of `job_machine`, which alone writes the job's state. The study's
thread and the main thread put an event and wait for its reply; the threads of the workers' socket only put events.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from autoddp.knobs import Configuration
from autoddp.launch.deadline import Deadline
from autoddp.launch.job_machine import (
    AttemptBegins,
    AttemptEnded,
    EndedElsewhere,
    Event,
    FactsAsked,
    FinishAsked,
    GaveUp,
    JobMachine,
    MeasureAsked,
    RankEnded,
    TakenOver,
    Tick,
)
from autoddp.launch.journal import Journal
from autoddp.launch.server import WorkerServer
from autoddp.log import get_logger
from autoddp.recipe import merged
from autoddp.wire import BlockDone, Entry, JobFacts, Measure

logger = get_logger(__name__)

_TICK = 0.5  # seconds between two looks at the limits in time

T = TypeVar("T")


class LiveJob:
    """Implements `study.Measure` for the study's thread; the main thread reports the attempts that it makes.

    `path` is that of the workers' socket, which is there during an attempt. After `close()` nothing may be asked.
    """

    def __init__(self, path: str, journal: Journal, deadline: Deadline | None = None) -> None:
        self._path = path
        self._next = 0
        self.inputs: tuple[str, ...] = ()
        """What the models were called with in all measurements, see `recipe.inputs`; the study's thread writes it."""
        self._number = -1
        self._server: WorkerServer | None = None
        self.machine = JobMachine(journal, deadline=deadline)
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
        """Put an event and wait for its reply, which always comes: see `job_machine`."""
        assert self._owner.is_alive(), "closed"
        self._events.put(event)
        return reply.result()

    # Called by the main thread

    def attempt_begins(self, number: int, heartbeats: Path) -> dict[str, str] | None:
        """Another start of the script is about to be made. The variables for it; None: tuning is over, make none."""
        reply: Future[dict[str, str] | None] = Future()
        variables = self._ask(AttemptBegins(number, heartbeats, reply), reply)
        if variables is not None:
            self._number = number
            self._server = WorkerServer(self._path, number, self._events.put)
        return variables

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
    ) -> BlockDone:
        """See `study.Measure`."""
        index, self._next = self._next, self._next + 1
        asked = Measure(index, configuration, warmup, steps, reduce, apply, compare, configuration.steps_per_update)
        reply: Future[BlockDone] = Future()
        done = self._ask(MeasureAsked(asked, configuration.start_variables, reply), reply)
        self.inputs = merged(self.inputs, done.inputs)
        return done

    def finish(self, recipe: str) -> None:
        """Tell all ranks to leave; every node writes the `recipe` of the node that leads. May raise TuningOver."""
        reply: Future[None] = Future()
        self._ask(FinishAsked(recipe, reply), reply)
