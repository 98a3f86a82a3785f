"""The running tuning job as the study sees it: a callable that measures, whatever happens to the processes."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

from autoddp.knobs import Configuration
from autoddp.launch.journal import Entry, Journal
from autoddp.launch.patience import Patience
from autoddp.launch.server import NOBODY, Heard, Worker, WorkerServer
from autoddp.launch.starts import Starts
from autoddp.log import get_logger
from autoddp.study import TrialFailed, TuningOver
from autoddp.timing import median
from autoddp.wire import BlockDone, Finish, Goodbye, Hello, JobFacts, Measure, Ready, StopTuning

logger = get_logger(__name__)

_FEWEST_STEPS = 2
_FUTILE_ATTEMPTS = 3
_MOST_FAULTS = 12  # attempts that may fail in a trial before tuning is given up


class LiveJob:
    """Implements `study.Measure`, from the study's thread; the main thread makes attempts and calls `attempt_*`."""

    def __init__(self, server: WorkerServer, journal: Journal) -> None:
        self._server = server
        self._journal = journal
        self._next = 0
        self._leader: Worker | None = None
        self._facts: JobFacts | None = None
        self._workers: list[Worker] = []
        self._first_failure = ""
        self._ready_in_this_start = False
        self._entries_before = 0
        self._most_steps = 10**9
        self._fresh_start = True
        self.waited = 0.0
        """Seconds spent waiting for another start of the script, or for the node that leads."""
        self._known_to_all = 0
        self._futile_attempts = self._faults = 0
        self._failed_start = ""
        self._hung = False
        self._patience = Patience()
        self._starts = Starts()
        self._over = ""
        self.wants_another_attempt = threading.Event()
        """Set while the present attempt is of no use and does not end by itself."""
        self.blames_overlay = False
        """Whether a script that never comes to a measurement may do so without the overlay: then tuning is not over."""
        self.overlay_failed = ""
        """Why the script cannot run under the overlay, once that has shown."""
        self.finished: Finish | None = None
        """What a follower hears from the leader's study."""

    # Called by the main thread

    def attempt_begins(self, heartbeats: Path) -> dict[str, str]:
        """Another start of the script is about to be made, with these variables."""
        self._starts.begin()
        self._failed_start = self._first_failure = ""
        self.wants_another_attempt.clear()
        self._server.go = not self._over
        self._patience.heartbeats = heartbeats
        self._workers = []
        self._ready_in_this_start = False
        self._entries_before = len(self._journal.entries)
        return self._starts.wanted

    def attempt_ended(self, failure: str) -> bool:
        """The attempt is over. Whether another one makes sense; else the study is told that tuning is over."""
        self._starts.settle(lambda: self.over)
        if self.over:
            return False
        if self.wants_another_attempt.is_set():
            return True
        if failure and not self._ready_in_this_start:
            return self._start_failed(failure)
        if not failure and not self._workers:
            return self._end("the script built no DistributedDataParallel model")
        if failure:
            self._faults += 1
            too_many = f"{_MOST_FAULTS} attempts have failed; the last: {failure}"
            return self._faults <= _MOST_FAULTS or self._end(too_many)
        if self._starts.stale:
            return True
        futile = len(self._journal.entries) == self._entries_before
        self._futile_attempts = self._futile_attempts + 1 if futile else 0
        if self._futile_attempts >= _FUTILE_ATTEMPTS:
            return self._end("the script ends before a single measurement can be made")
        return True

    def _start_failed(self, failure: str) -> bool:
        """Before its first measurement: the fault of the variables that the study wanted, or the script's own."""
        if self.blames_overlay and self._facts is None:
            self.overlay_failed = self.overlay_failed or self._first_failure or failure
            return True
        if not self._starts.has_variables:
            return self._end(self._first_failure or failure)
        self._failed_start = self._first_failure or failure
        return True

    @property
    def is_ready(self) -> bool:
        """Whether the present attempt has come to its first measurement."""
        return self._ready_in_this_start

    def peer_failed(self, why: str) -> None:
        """Main thread: the attempt has ended on another host."""
        self._failed(why)

    @property
    def over(self) -> bool:
        """Whether no attempt is of use any more."""
        return bool(self._over) or self.finished is not None

    @property
    def why_over(self) -> str:
        """Why tuning ended; "" if the study was finished, or goes on."""
        return self._over

    def _end(self, why: str) -> bool:
        self._over = self._over or why
        self._server.dismiss()
        self._server.heard.put(Heard(NOBODY, None))
        return False

    # Called by the study's thread

    def facts(self) -> JobFacts:
        """Wait until the job is ready."""
        while self._facts is None:
            self._take(self._hear(None))
        return self._facts

    def finish(self, recipe: str) -> None:
        """Tell all ranks to leave; every node writes the `recipe` of the node that leads when it is told."""
        if self._facts is None or self._facts.nodes == 1:
            self.finished = Finish(recipe)  # whether or not anybody is there to be told
        self._starts.wanted = {}
        while self.finished is None:
            if self._leader is not None:
                self._tell(self._leader, Finish(recipe))
            else:
                self._take(self._hear(None))
        self._server.dismiss()

    def _tell(self, leader: Worker, message: Finish) -> None:
        try:
            leader.send(message)
            self.finished = message
        except OSError:
            self._leader = None

    def give_up(self, why: str) -> None:
        """Stop tuning: the workers of this node leave, here and after any restart."""
        self._end(why)

    def __call__(
        self,
        configuration: Configuration,
        warmup: int,
        steps: int,
        *,
        reduce: bool = True,
        turn: bool = True,
        compare: int = 0,
    ) -> BlockDone:
        """See `study.Measure`."""
        index, self._next = self._next, self._next + 1
        asked = Measure(
            index, configuration.plain(), warmup, steps, reduce, turn, compare, configuration.steps_per_update
        )
        self._starts.wanted = configuration.start_variables
        entry = self._entry(asked)
        if entry.done is None:
            raise TrialFailed(entry.failure)
        self._patience.step_seconds = self._patience.step_seconds or median(entry.done.seconds)
        return entry.done

    def _entry(self, asked: Measure) -> Entry:
        """From the journal, as long as it has what is asked; then, on the node that leads, from the running model."""
        while True:
            if asked.index < len(self._journal.entries):
                return self._journal.entries[asked.index]
            if self._leader is not None and self._starts.stale:
                self._leave_start(self._leader)
            elif self._leader is not None:
                entry = self._measure(asked, self._leader)
                if entry is not None:
                    self._journal.add(entry)
            else:
                self._wait_for_a_leader(asked)

    def _leave_start(self, leader: Worker) -> None:
        """The ranks leave; the main thread starts the script again, with the variables wanted."""
        self._leader = None
        with contextlib.suppress(OSError):  # gone already
            leader.send(Finish("", again=True))

    def _wait_for_a_leader(self, asked: Measure) -> None:
        began = time.perf_counter()
        self._take(self._hear(1.0))
        self.waited += time.perf_counter() - began
        if self._leader is not None or self._ready_in_this_start:
            return
        if self._starts.hangs or self._failed_start:
            self._journal.add(Entry(asked, None, self._failed_start or self._starts.why_hung))
            self._failed_start = ""
            self._starts.wanted = {}
            self.wants_another_attempt.set()

    def _measure(self, asked: Measure, leader: Worker) -> Entry | None:
        """One attempt; None when the script has simply ended meanwhile."""
        order = self._order_for(asked)
        done = self._send(leader, order)
        if done is not None:
            self._known_to_all = asked.index  # no rank ends a block before it has told of the one before
            return Entry(asked, done)
        self._leader = None
        if self._first_failure:
            return Entry(asked, None, self._cause)
        # Whatever remains must fit between two of the script's ends.
        self._most_steps = max(_FEWEST_STEPS, order.steps // 2)
        return None

    @property
    def _cause(self) -> str:
        """Why the ranks are gone. One that was killed cannot say so, and its peers may complain before it is missed."""
        for worker in self._workers:
            ended = not worker.said_goodbye and not self._hung and worker.ended_by.wait(timeout=2.0)
            # SIGTERM is elastic's, for those that are left.
            if ended and worker.end.startswith("killed by") and not worker.end.endswith("SIGTERM"):
                return f"rank {worker.hello.rank} {worker.end}"
        return self._first_failure

    def _order_for(self, asked: Measure) -> Measure:
        """What is asked, cut to a short script; after a restart nothing is in effect that was turned on before."""
        steps = min(asked.steps, self._most_steps)
        again = self._fresh_start and not asked.turn
        before = self._journal.entries[self._known_to_all : asked.index] if self._fresh_start else []
        self._fresh_start = False
        return replace(
            asked,
            steps=steps,
            turn=asked.turn or again,
            warmup=max(asked.warmup, 2) if again else asked.warmup,
            missed=tuple(entry.plain() for entry in before),
        )

    def _send(self, leader: Worker, order: Measure) -> BlockDone | None:
        """Send it and wait: the block, or None once the leader has gone."""
        self._first_failure, self._hung = "", False
        try:
            leader.send(order)
        except OSError:
            self._drain_until_gone(leader)
            return None
        patience = self._patience.with_(order)
        began = time.time()
        while True:
            heard = self._hear(1.0)
            if heard is None:
                self._kill_if_hung(began, patience)
                continue
            self._take(heard)
            if heard.worker is leader and isinstance(heard.message, BlockDone):
                return heard.message
            if heard.worker is leader and heard.message is None:
                return None

    def _kill_if_hung(self, began: float, patience: float) -> None:
        if self._first_failure or not self._patience.is_over(began, patience):
            return
        self._first_failure = f"hung: no rank has moved for {patience:.0f} s"
        self._hung = True
        for worker in self._workers:
            try:
                os.kill(worker.hello.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _drain_until_gone(self, leader: Worker) -> None:
        while True:
            heard = self._hear(None)
            self._take(heard)
            if heard is not None and heard.worker is leader and heard.message is None:
                return

    def _hear(self, timeout: float | None) -> Heard | None:
        if self._over:
            raise TuningOver(self._over)
        try:
            return self._server.heard.get_nowait()
        except queue.Empty:
            self._starts.listening.set()
        try:
            return self._server.heard.get(timeout=timeout)
        except queue.Empty:
            return None
        finally:
            self._starts.listening.clear()

    def _take(self, heard: Heard | None) -> None:
        """Keep account of who is here and why anybody left."""
        if heard is not None and isinstance(heard.message, StopTuning):
            if heard.message.overlay_is_to_blame:
                self.overlay_failed = self.overlay_failed or heard.message.reason
                self.wants_another_attempt.set()
            else:
                self._end(heard.message.reason)
        if heard is None or heard.worker is NOBODY:
            return
        worker, message = heard.worker, heard.message
        if isinstance(message, Hello):
            self._new_worker(worker, message)
        elif isinstance(message, Ready):
            self._facts, self._ready_in_this_start = message.facts, True
            self._patience.compiles = message.facts.compiles
            self._starts.ready()
            if worker.hello.rank == 0:
                self._leader, self._fresh_start = worker, True
        elif isinstance(message, BlockDone) and worker.hello.rank != 0:
            self._copy(message)
        elif isinstance(message, Finish) and not message.again:
            self.finished = message
            self._end("the study was finished by another node's launcher")
        elif isinstance(message, Goodbye) and message.reason:
            self._failed(f"rank {message.rank}: {message.reason}")
        elif message is None:
            self._gone(worker)

    def _copy(self, message: BlockDone) -> None:
        """Another node's launcher leads: keep its journal."""
        order = Measure(**message.measure)
        for plain in order.missed:
            self._journal.add(Entry.of(plain))
        self._journal.add(Entry(replace(order, missed=()), message))

    def _new_worker(self, worker: Worker, hello: Hello) -> None:
        if any(present.hello.local_rank == hello.local_rank for present in self._workers):
            self._workers = []  # elastic has started the group again, because a node came or went
            self._ready_in_this_start = False
        self._workers.append(worker)

    def _gone(self, worker: Worker) -> None:
        if not worker.said_goodbye and self.finished is None:
            worker.ended_by.wait(timeout=2.0)
            self._failed(f"rank {worker.hello.rank} {worker.end or 'vanished'}")

    def _failed(self, why: str) -> None:
        # The first in time is the cause; the others are ranks that lost a peer.
        self._first_failure = self._first_failure or why
