"""The state machine of the tuning job: its states, and the one object that decides what follows from each event.

    machine = JobMachine(Journal(path))
    machine.handle(AttemptBegins(0, heartbeats, {}, reply))   # one call at a time; whoever asked waits at `reply`

There is no thread and no queue here; `live_job` adds those. Beside the journal, the only effects outside are those of
`Worker`: a message, a closed connection, a killed process. An attempt is one start of the script.

State               | Event                                        | Next state | What is done
--------------------|----------------------------------------------|------------|---------------------------------------
BETWEEN             | AttemptBegins                                | STARTING   | reply: it makes sense
STARTING, READY,    |                                              |            |
MEASURING           | Hello                                        | the same   | Welcome: go
STARTING            | Ready                                        | READY      | the study gets its facts; in the first
                    |                                              |            | start: does this launcher lead?
STARTING            | Ready, and another host leads than before    | OVER       | as for GaveUp
STARTING            | a rank fails, or its script ends             | LEAVING    | kept for the verdict
STARTING            | Tick: a start with variables takes too long  | LEAVING    | the measurement fails; end the
                    |                                              |            | attempt now
READY               | the study asks; rank 0 is here               | MEASURING  | Measure goes to rank 0
READY               | the same, with other variables               | LEAVING    | Finish(again) goes to rank 0
READY               | the same; rank 0 has gone already            | LEAVING    | the question stays open
READY               | BlockDone of another host's rank 0           | READY      | journal
READY               | a rank fails, or its script ends             | LEAVING    |
MEASURING           | BlockDone                                    | READY      | journal; the study gets the block
MEASURING           | a rank fails, or rank 0's script ends        | LOST       | wait for the cause
MEASURING           | Tick: the ranks have waited for each other   |            |
                    | for too long                                 | LEAVING    | kill the ranks; the measurement fails
LOST                | the end of each rank is known, or Tick: 5 s  | LEAVING    | the measurement fails; without any
                    |                                              |            | failure: it stays open, for fewer
                    |                                              |            | steps; once, after steps without
                    |                                              |            | reduction in this attempt: it stays
                    |                                              |            | open as it is
LOST                | BlockDone, late                              | LEAVING    | journal; the study gets the block
STARTING … LOST     | Finish(again) from another host              | LEAVING    | the question stays open
STARTING … LOST     | EndedElsewhere                               | as where a | end the attempt now
                    |                                              | rank fails |
READY, MEASURING    | EndedElsewhere, where the script has ended   | LEAVING or | the same, and no failure, unless all
                    | there and nothing has failed                 | LOST       | ranks here wait for those there
STARTING … LEAVING  | StopAsked, the overlay is to blame           | LEAVING    | end the attempt now; another follows
STARTING … LEAVING  | AttemptEnded                                 | JUDGING    | an order that is out: as in LOST
                    |                                              |            | and one that was left open without a
                    |                                              |            | reason fails by an exit code
LEAVING             | after 20 s                                   | LEAVING    | end the attempt
JUDGING             | the study asks, or Tick: 10 s                | BETWEEN    | reply: another attempt
JUDGING             | the same; another attempt makes no sense     | OVER       | reply: no
JUDGING             | the study asks what has made this start fail | JUDGING    | the measurement fails
any                 | GaveUp, StopAsked, Finish of another host    | OVER       | hang up on all ranks; the study gets
                    |                                              |            | TuningOver; end the attempt
any                 | the time is over, see `deadline`              | OVER       | the same
any                 | the study finishes; one host                 | OVER       | the same, without TuningOver
READY               | the study finishes; several hosts; rank 0 is |            |
                    | here                                         | OVER       | Finish goes to rank 0, then the same
OVER                | Hello                                        | OVER       | Welcome: do not go
OVER                | the study asks                               | OVER       | what the journal has, else TuningOver
OVER                | AttemptBegins, AttemptEnded                  | OVER       | reply: no

Whatever is not in the table changes no state: a message of an attempt that has ended, a second failure, a Hello in
LOST, LEAVING, JUDGING or BETWEEN (Welcome: do not go). Where a host comes or goes, elastic may start the ranks again;
they would find what the last ones have written, so they are sent away, because those count as failed.

On several hosts the launcher on rank 0's host leads: its study says what is measured, and its clock ends tuning. The
other launchers have no study. They copy the journal, and say of the end of an attempt only what has failed here.

The study asks one question at a time, which is answered at the latest when tuning is over. Every state has a limit in
time but three: in BETWEEN, STARTING and READY the launcher's main thread sees to the end, see `tune`.
"""

from __future__ import annotations

import contextlib
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum

from autoddp.attempts.job.attempt_record import AttemptRecord, changed_by
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
    Question,
    RankEnded,
    Said,
    StopAsked,
    TakenOver,
    Tick,
    Worker,
)
from autoddp.attempts.job.hang_timeout import HangTimeout
from autoddp.attempts.job.journal import Journal
from autoddp.attempts.job.own_faults import OwnFaults
from autoddp.attempts.job.restarts import Starts
from autoddp.codec import replace
from autoddp.hosts.together import ENDED_THERE
from autoddp.study import INTERRUPTED, TrialFailed, TuningOver
from autoddp.timing import median
from autoddp.units import duration
from autoddp.wire import (
    BlockDone,
    Entry,
    Finish,
    Goodbye,
    Hello,
    JobFacts,
    Measure,
    Ready,
    Start,
    Welcome,
)

NO_DDP = "the script built no DistributedDataParallel model"
TOO_SHORT = "the script ends before a single measurement can be made; give it more data, or another epoch"
"""Why there is nothing to measure in a script that is in order."""
_FEWEST_USABLE = 8  # steps of a start that can be measured: with fewer, each measurement would cost a start
_FEWEST_STEPS = 2  # of a measurement, however often the script ends before one is done: one step would be a guess
_FUTILE_ATTEMPTS = 3  # one after another without a measurement; each may ask for half as many steps as the one before
_MOST_FAULTS = 12  # attempts that may fail in a trial before tuning is given up
_MOST_AGAIN = 2  # orders that are given once more because the steps before them may be to blame for their failure
_MOVED = "rank 0 is on another host than before"
_CAUSE = 5.0  # seconds in which the ends of all ranks must be known once one of them has failed
_LEAVING = 20.0  # seconds in which ranks that leave must be gone
_SETTLING = 10.0  # seconds in which the study must have said what it wants next


class State(Enum):
    """The state of the tuning job, see the module's table."""

    BETWEEN = "no attempt runs"
    STARTING = "the script starts"
    READY = "the ranks wait for an order, or follow another host's rank 0"
    MEASURING = "rank 0 has an order"
    LOST = "a rank has failed with an order out; the cause is awaited"
    LEAVING = "the attempt is of no more use; its ranks end or are ended"
    JUDGING = "the attempt has ended; what the study wants next is awaited"
    OVER = "no attempt makes sense any more"


_MOST_OF_A_NAME = 40  # letters of a configuration in a line that says what is waited for
_IN_WORDS = {
    State.BETWEEN: "the next start of the script is being prepared",
    State.STARTING: "waiting for the script's first steps",
    State.READY: "the ranks wait until it is known what to measure next",
    State.OVER: "the end is being prepared",
}
_AGAIN = "the script was started again, waiting for its first steps"
_ENDS = "waiting for the end of this start of the script"
_RUNNING = (State.STARTING, State.READY, State.MEASURING, State.LOST)


class JobMachine:
    """See the module. `clock` gives seconds. Other threads may read the public attributes, and only `handle` writes."""

    def __init__(
        self,
        journal: Journal,
        hang_timeout: HangTimeout | None = None,
        deadline: Deadline | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = State.BETWEEN
        self.why_over = ""
        """Why tuning ended; "" if the study was finished here, or goes on."""
        self.leads: bool | None = None
        """Whether rank 0 is on this host, so that this launcher says what is measured; None until that is known."""
        self.overlay_failed = ""
        """Why the script cannot run under the overlay, once that has shown."""
        self.built_ddp = False
        """Whether a rank of this node has built a DDP model, in whatever attempt."""
        self.waited = 0.0
        """Seconds for which the study has waited for another start of the script."""
        self._journal = journal
        self._hang_timeout = hang_timeout or HangTimeout()
        self._deadline = deadline or Deadline(clock=clock)
        self._clock = clock
        self._starts = Starts(clock)
        self._attempt = AttemptRecord(-1)
        self._facts: JobFacts | None = None
        self._question: Question | None = None
        self._waiting_since: float | None = None
        self._asked_at = 0.0
        self._most_steps: int | None = None  # no limit, until the script has ended within a measurement
        self._fresh_start = True
        self._known_to_all = 0
        self._starts_before = 0  # those of a study that goes on
        self._length: int | None = None  # see `wire.Start`
        self._asked_again: list[int] = []
        self._ended_in = -1  # the order without reduction that was out when a script last ended without a reason
        self._futile_attempts = self._faults = 0
        self._own_faults = OwnFaults()

    @property
    def attempt_must_end(self) -> bool:
        """Whether the processes of the present attempt are to be killed now."""
        at = self._attempt.must_end_at
        return at is not None and self._clock() >= at

    @property
    def ended_by_us(self) -> bool:
        """Whether the processes of the present attempt were to be killed though nothing in it has failed."""
        attempt = self._attempt
        return self.attempt_must_end and attempt.was_ready and not (attempt.failures or attempt.another_follows)

    @property
    def is_starting(self) -> bool:
        """Whether the present attempt may still come to its first measurement."""
        return self.state is State.STARTING

    @property
    def over(self) -> bool:
        """Whether no attempt is of use any more."""
        return self.state is State.OVER

    @property
    def follows(self) -> bool:
        """Whether the ranks here do what another host's rank 0 is told."""
        return self.state is State.READY and self.leads is False

    @property
    def measuring(self) -> float:
        """Seconds for which a measurement of an attempt that is ready has been waited for; 0.0 if none is."""
        asked = self.state in (State.READY, State.MEASURING) and isinstance(self._question, MeasureAsked)
        return self._clock() - max(self._asked_at, self._attempt.ready_at) if asked or self.follows else 0.0

    @property
    def in_words(self) -> str:
        """What is being done, or waited for."""
        if self.is_starting and self._attempt.number > 0:
            return _AGAIN
        if not self.measuring:
            return _IN_WORDS.get(self.state, _ENDS)
        if self.follows:
            return f"following the host that leads, {len(self._journal.entries)} measurements so far"
        order = self._attempt.order
        what = textwrap.shorten(changed_by(order), _MOST_OF_A_NAME, placeholder=" …") if order is not None else ""
        so_far = f", {duration(self.measuring)} so far" if self.measuring >= 1 else ""
        return f"measuring {what or 'the script as written'}{so_far}"

    @property
    def ended(self) -> tuple[int, ...]:
        """Ranks of this node that run no more in the present attempt."""
        return tuple(worker.hello.rank for worker in self._attempt.workers if worker.said_goodbye or worker.end)

    @property
    def wanted(self) -> dict[str, str]:
        """The variables that the study wants the next start to have."""
        return dict(self._starts.wanted)

    @property
    def at_most(self) -> float | None:
        """Seconds that tuning may still take, where that is known."""
        return None if self.leads is False else self._deadline.at_most

    @property
    def cause(self) -> str:
        """See `AttemptRecord.cause`, of the present attempt."""
        return self._attempt.cause

    def handle(self, event: Event) -> None:
        """Take one event and do all that follows from it."""
        attempt = self._attempt
        match event:
            case FactsAsked() | MeasureAsked() | FinishAsked():
                self._asked(event)
            case GaveUp(why):
                self._end(why)
                event.reply.set_result(None)
            case TakenOver(entries):
                self._journal.earlier = entries
                self._starts_before = 1 + max((entry.asked.start.number for entry in entries), default=-1)
                event.reply.set_result(None)
            case AttemptBegins():
                self._attempt_begins(event)
            case AttemptEnded():
                self._attempt_ended(event)
            case EndedElsewhere(why):
                self._ended_elsewhere(why)
                self._end_attempt(within=0.0)
            case RankEnded(number, pid, how) if number == attempt.number:
                for worker in attempt.workers:
                    if worker.hello.pid == pid:
                        worker.end = how
            case Said(number, worker, Hello()):
                self._hello(number, worker)
            case Said(_, worker, message) if worker in attempt.workers:
                self._said(worker, message)
            case Closed(_, worker) if worker in attempt.workers:
                self._closed(worker)
            case StopAsked(message):
                self._stop_asked(message.reason, message.overlay_is_to_blame)
            case Tick():
                self._tick()
        self._look_at_the_clock()
        self._find_cause()
        self._answer()
        self._conclude()

    def broke(self, why: str) -> None:
        """`handle` has raised: end tuning, and let nobody wait."""
        self._end(why)
        question, self._question = self._question, None
        ended, self._attempt.ended = self._attempt.ended, None
        if question is not None and not question.reply.done():
            question.reply.set_exception(TuningOver(why))
        if ended is not None:
            ended.reply.set_result(False)

    # The study's question

    def _asked(self, question: Question) -> None:
        self._question = question
        self._waiting_since = self._asked_at = self._clock()
        if not isinstance(question, FactsAsked):
            self._starts.wanted = dict(question.variables) if isinstance(question, MeasureAsked) else {}

    def _answer(self) -> None:
        """Answer the study's question, or send it on to rank 0, if the state allows either."""
        question, leader = self._question, self._attempt.leader
        # Where tuning is over, what was measured before still leads to a decision. After a signal nobody waits for one.
        entry = None
        if isinstance(question, MeasureAsked) and self.why_over != INTERRUPTED:
            entry = self._journal.answer(question.asked)
        match question:
            case FactsAsked() if self._facts is not None:
                question.reply.set_result(self._facts)
                self._question = None
            case MeasureAsked() if entry is not None:
                self._give(entry, question.reply)
                self._question = None
            case FinishAsked() if self._is_one_host:
                self._finish(question)
            case FactsAsked() | MeasureAsked() | FinishAsked() if self.state is State.OVER:
                question.reply.set_exception(TuningOver(self.why_over))
                self._question = None
            case MeasureAsked() if self.state is State.READY and leader is not None:
                self._order(question, leader)
            case FinishAsked() if self.state is State.READY and leader is not None:
                self._tell_finish(question, leader)
            case MeasureAsked() if (
                self.state is State.JUDGING and self._attempt.start_failed and not self._starts.stale
            ):
                self._fail_start(question, self._attempt.start_failed)
                self._answer()

    @property
    def _is_one_host(self) -> bool:
        return self._facts is None or self._facts.nodes == 1

    def _give(self, entry: Entry, reply: Future[BlockDone]) -> None:
        if self._waiting_since is not None:
            self.waited += self._clock() - self._waiting_since
        if entry.done is None:
            reply.set_exception(TrialFailed(entry.failure))
            return
        self._hang_timeout.step_seconds = self._hang_timeout.step_seconds or median(entry.done.seconds)
        reply.set_result(replace(entry.done, left=entry.asked.left, start=entry.asked.start))

    def _order(self, question: MeasureAsked, leader: Worker) -> None:
        attempt = self._attempt
        if self._starts.stale:
            with contextlib.suppress(OSError):  # gone already
                leader.send(Finish(again=True))
            attempt.told_to_leave = True
            self._leave()
            return
        order = self._order_for(question.asked)
        try:
            leader.send(order)
        except OSError:
            self._failed(leader)  # before it had the order: the configuration is not to blame
            return
        if self._waiting_since is not None:
            self.waited += self._clock() - self._waiting_since
            self._waiting_since = None
        attempt.order, attempt.ordered_at = order, self._hang_timeout.clock()
        attempt.parted |= not order.reduce
        changes = changed_by(order)
        attempt.tried, attempt.is_trying = changes or attempt.tried, bool(changes)
        self.state = State.MEASURING

    def _order_for(self, asked: Measure) -> Measure:
        """The order for what is asked, with no more steps than a short script has.

        A new start of the script has its own settings, so there the order also applies those that are asked for.
        """
        again = self._fresh_start and not asked.apply
        before = self._journal.entries[self._known_to_all : asked.index] if self._fresh_start else []
        self._fresh_start = False
        most, attempt = self._most_steps, self._attempt
        return replace(
            asked,
            steps=asked.steps if most is None else min(asked.steps, most),
            apply=asked.apply or again,
            warmup=max(asked.warmup, 2) if again else asked.warmup,
            missed=tuple(before),
            left=self._deadline.left,
            start=Start(
                number=self._starts_before + attempt.number,
                seconds=attempt.ready_at - attempt.began,
                steps=attempt.steps_before,
                length=self._length,
                spent=self._deadline.spent,
                limits=self._deadline.is_open,
            ),
        )

    def _tell_finish(self, question: FinishAsked, leader: Worker) -> None:
        try:
            leader.send(Finish())
        except OSError:
            self._failed(leader)  # the leader of another attempt is told
            return
        self._finish(question)

    def _finish(self, question: FinishAsked) -> None:
        self._question = None
        self._end("")
        question.reply.set_result(None)

    def _fail_start(self, question: MeasureAsked, why: str) -> None:
        """The variables of this start are to blame for it: what asked for them has failed."""
        self._journal.add(Entry(question.asked, None, why))
        self._starts.wanted, self._attempt.start_failed = {}, ""

    # The attempt

    def _attempt_begins(self, event: AttemptBegins) -> None:
        if self.state is State.OVER:
            event.reply.set_result(False)
            return
        self._attempt = AttemptRecord(event.number, self._clock(), len(self._journal.entries))
        self._hang_timeout.attempt_begins(event.heartbeats)
        self.state = State.STARTING
        self._starts.begin(event.variables)
        event.reply.set_result(True)

    def _hello(self, number: int, worker: Worker) -> None:
        attempt = self._attempt
        go = number == attempt.number and self.state in (State.STARTING, State.READY, State.MEASURING)
        if go:
            attempt.workers.append(worker)
            self.built_ddp = self.built_ddp or worker.hello.built_ddp
        with contextlib.suppress(OSError):  # gone already
            worker.send(Welcome(go))

    def _said(self, worker: Worker, message: object) -> None:
        attempt = self._attempt
        match message:
            case Ready() if self.state in (State.STARTING, State.READY):
                self._ready(worker, message)
            case BlockDone() if worker is attempt.leader:
                self._block_done(message)
            case BlockDone() if attempt.leader is None and worker.hello.rank != 0:
                self._copy(message)
            case Finish(again=True):
                attempt.told_to_leave = True
                self._leave()
            case Finish():
                self._end("")
            case Goodbye():
                worker.said_goodbye = True
                attempt.steps = max(attempt.steps, message.steps)
                if message.reason:
                    self._failed(f"rank {message.rank}: {message.reason}", message.at)
                elif self.state in (State.STARTING, State.READY):
                    self._leave()
                elif self.state is State.MEASURING and worker is attempt.leader:
                    self._lose()

    def _ready(self, worker: Worker, message: Ready) -> None:
        here = worker.hello.rank == 0  # only rank 0, and local rank 0 of every other host, say that they are ready
        if self.leads is not None and self.leads != here:
            self._end(_MOVED)
            return
        self.leads = here
        self._facts, self._attempt.was_ready = message.facts, True
        self._hang_timeout.compiles = message.facts.compiles
        self._starts.ready()
        self._deadline.stepped()
        self._attempt.ready_at = self._attempt.ready_at or self._clock()
        self._attempt.steps_before = message.steps
        if here:
            self._attempt.leader, self._fresh_start = worker, True
        self.state = State.READY

    def _block_done(self, message: BlockDone) -> None:
        attempt, question = self._attempt, self._question
        if attempt.order is None or message.index != attempt.order.index:
            return
        assert isinstance(question, MeasureAsked)
        given = replace(question.asked, left=attempt.order.left, start=attempt.order.start)
        self._journal.add(Entry(given, replace(message, measure=None)))
        self._known_to_all = message.index  # no rank ends a block before it has told of the one before
        attempt.order, attempt.is_trying = None, False
        if self.state is State.MEASURING:
            self.state = State.READY
        else:
            self._leave()

    def _copy(self, message: BlockDone) -> None:
        """Another node's launcher leads: keep its journal."""
        order, self._asked_at = message.measure, self._clock()
        if order is None:
            return
        for entry in (*order.missed, Entry(replace(order, missed=()), replace(message, measure=None))):
            self._journal.add(entry)

    def _closed(self, worker: Worker) -> None:
        if not worker.said_goodbye and not self._attempt.told_to_leave:
            self._failed(worker)

    def _ended_elsewhere(self, why: str) -> None:
        """The attempt cannot go on here.

        After the script's end rank 0 may evaluate or save for a while, which is no fault of what was to be measured.
        Where the ranks here wait, one there has left too early.
        """
        waits = self.state is State.MEASURING and self._hang_timeout.waited(self.ended) > _CAUSE
        if why != ENDED_THERE or waits or not self._attempt.was_ready:
            self._failed(why)
        elif self.state is State.MEASURING:
            self._lose()
        elif self.state is not State.LOST:
            self._leave()

    def _failed(self, why: str | Worker, at: float = 0.0) -> None:
        """The first failure in time is the cause; the others are ranks that lost a peer, or that were killed for it.

        `at`: when a rank ended, if it said that.
        """
        if self.state not in (*_RUNNING, State.LEAVING) or self.attempt_must_end:
            return
        self._attempt.failures.append(why)
        if isinstance(why, str) and at:
            self._attempt.complaints[why] = at
        if self.state is State.MEASURING:
            self._lose()
        elif self.state is not State.LOST:
            self._leave()

    def _lose(self) -> None:
        self.state = State.LOST
        self._attempt.limit = self._clock() + _CAUSE

    def _leave(self, at_once: bool = False) -> None:
        """The ranks leave, or are made to."""
        if self.state not in (*_RUNNING, State.LEAVING):
            return
        self.state = State.LEAVING
        if self._attempt.order is not None:
            self._take_back_the_order()
        self._end_attempt(within=0.0 if at_once else _LEAVING)

    def _end_attempt(self, within: float) -> None:
        at = self._clock() + within
        self._attempt.must_end_at = at if self._attempt.must_end_at is None else min(at, self._attempt.must_end_at)

    def _stop_asked(self, reason: str, overlay_is_to_blame: bool) -> None:
        if overlay_is_to_blame:
            self.overlay_failed = self.overlay_failed or reason
            self._attempt.another_follows = True
            self._leave(at_once=True)
        else:
            self._end(reason)
            self._end_attempt(within=0.0)

    def _tick(self) -> None:
        attempt, question = self._attempt, self._question
        if self.state is State.MEASURING:
            assert attempt.order is not None
            seconds = self._hang_timeout.of(attempt.order)
            if self._hang_timeout.is_over(attempt.ordered_at, seconds, self.ended):
                attempt.hung = self._hang_timeout.says(seconds)
                for worker in attempt.workers:
                    worker.kill()
                self._failed(attempt.hung)
        elif self.state is State.STARTING and self._starts.hangs and isinstance(question, MeasureAsked):
            self._fail_start(question, self._starts.why_hung)
            attempt.another_follows = True
            self._leave(at_once=True)

    def _look_at_the_clock(self) -> None:
        """A study that is about to finish may do so; where another host leads, its clock counts."""
        why = self._deadline.why_over
        if self.leads is not False and why and not isinstance(self._question, FinishAsked):
            none_fits = self._length is not None and not self._journal.entries
            short = f"no start of {self._length} steps was long enough for a measurement: " if none_fits else ""
            self._end(f"{short}{why}")

    def _find_cause(self) -> None:
        """Decide, in LOST, what becomes of the order: once each rank's end is known, or has been waited for."""
        attempt = self._attempt
        if self.state is not State.LOST:
            return
        known = attempt.hung or all(worker.said_goodbye or worker.end for worker in attempt.workers)
        if known or self._clock() >= attempt.limit:
            self._order_lost(self.cause)
            self._leave()

    def _order_lost(self, cause: str) -> None:
        """Rank 0 does not answer any more. Without a cause the script has ended by itself."""
        attempt = self._attempt
        assert attempt.order is not None
        assert isinstance(self._question, MeasureAsked)
        if cause and self._order_is_repeated:
            self._asked_again.append(attempt.order.index)
        elif cause:
            measured = len(self._journal.entries) - attempt.entries_before
            if not (attempt.parted or attempt.hung):
                self._own_faults.failed(attempt.order, measured, attempt.steps, cause)
            self._journal.add(Entry(self._question.asked, None, cause))
        else:
            attempt.unanswered = attempt.order  # the end of the attempt tells more, see `_settle`
        self._take_back_the_order()

    def _settle(self, order: Measure) -> None:
        """Decide, when all processes are gone, what becomes of an order whose ranks have left without a reason.

        By `sys.exit(1)` a script raises nothing that a rank could tell; many leave so where their loss is NaN. What has
        no room between two of the script's ends would be asked for until tuning is given up. So would steps without
        reduction, where the script ends because of what they do: the study can do without them.
        """
        attempt, usable = self._attempt, self._attempt.usable
        attempt.unanswered = None
        why = next((f"rank {w.hello.rank} {w.end}" for w in attempt.workers if w.left_by_a_code), "")
        least = (order.warmup + _FEWEST_STEPS) * order.at_once
        if not why and order.at_once > 1 and usable is not None and usable < least:
            why = f"a start of the script gives {usable} steps to measure, and {least} are needed"
        if not why and order.index == self._ended_in:
            why = attempt.how_ended
        self._ended_in = -1 if order.reduce else order.index
        if why:
            attempt.order = order
            self._order_lost(why)
        else:
            self._most_steps = max(_FEWEST_STEPS, order.steps // 2 if usable is None else usable // 3)

    @property
    def _order_is_repeated(self) -> bool:
        """Whether the order is to be given once more, after another start: its failure may have another cause.

        A script may check that its ranks are alike. After steps without reduction they are not, and then the check
        fails in whatever comes next.
        """
        order, attempt = self._attempt.order, self._attempt
        assert order is not None
        is_first = order.index not in self._asked_again and len(self._asked_again) < _MOST_AGAIN
        return attempt.parted and order.reduce and not attempt.hung and is_first

    def _take_back_the_order(self) -> None:
        self._attempt.order, self._waiting_since = None, self._clock()

    # The end of an attempt, and of tuning

    def _attempt_ended(self, event: AttemptEnded) -> None:
        attempt = self._attempt
        attempt.ended = event
        if self.state is State.OVER:
            return
        ended_here = self.attempt_must_end and not attempt.failures
        failure = "" if ended_here else event.failure and (self.cause or event.failure)
        if attempt.order is not None:
            self._order_lost(failure or self.cause)
        if attempt.unanswered is not None:
            self._settle(attempt.unanswered)
        if failure and not attempt.was_ready and not attempt.another_follows:
            if event.blames_overlay and self._facts is None:
                self.overlay_failed = self.overlay_failed or failure
                attempt.another_follows = True
            elif self._starts.has_variables and not self._starts.stale:
                attempt.start_failed = failure
        if not failure and attempt.was_ready and not (attempt.told_to_leave or attempt.another_follows or ended_here):
            self._script_has_ended(attempt)
        attempt.failure = failure
        attempt.limit = self._clock() + _SETTLING
        self.state = State.JUDGING

    def _script_has_ended(self, attempt: AttemptRecord) -> None:
        """Note how long a script is that has ended by itself; under what has been tried it may be faster."""
        as_written = attempt.steps * (self._hang_timeout.step_seconds or 0.0)
        seconds = max(as_written, self._clock() - attempt.ready_at)
        self._deadline.script_took(seconds, attempt.steps, attempt.how_ended)
        if attempt.steps:
            self._length = min(attempt.steps, self._length or attempt.steps)

    def _conclude(self) -> None:
        """After an attempt: reply whether there is another one, once the study has said what it wants next."""
        ended = self._attempt.ended
        if ended is None:
            return
        if self.state is State.JUDGING:
            waits = self._question is None and self.leads is not False
            if waits and self._clock() < self._attempt.limit:
                return
            why = self._why_no_other_attempt()
            if why:
                self._end(why)
            else:
                self.state = State.BETWEEN
        self._attempt.ended = None
        ended.reply.set_result(self.state is not State.OVER)
        self._answer()

    def _why_no_other_attempt(self) -> str:
        """ "" if another attempt makes sense."""
        attempt = self._attempt
        if attempt.another_follows:
            return ""
        if attempt.failure and not attempt.was_ready:
            return "" if self._starts.has_variables else attempt.failure
        if not attempt.failure and not attempt.workers:
            return NO_DDP
        if not attempt.failure and self._facts is None:
            return TOO_SHORT  # no order was out that could be a shorter one: another start would end in the same way
        if self.leads is False:
            return ""
        if attempt.failure and not self._journal.entries and self._is_one_host:
            return attempt.failure
        if self._own_faults.why:
            return self._own_faults.why
        if attempt.failure:
            self._faults += 1
            too_many = f"{self._faults} attempts have failed; the last: {attempt.failure}"
            return too_many if self._faults > _MOST_FAULTS else ""
        if self._starts.stale:
            return ""
        futile = len(self._journal.entries) == attempt.entries_before
        self._futile_attempts = self._futile_attempts + 1 if futile else 0
        if self._futile_attempts >= _FUTILE_ATTEMPTS:
            never = not self._journal.entries and not attempt.tried
            many = f"{_FUTILE_ATTEMPTS} starts have ended before that was measured"
            return TOO_SHORT if never else f"{attempt.how_ended}; {many}"
        if not futile and not attempt.is_trying and attempt.usable is not None and attempt.usable < _FEWEST_USABLE:
            few = f"a start of the script gives {attempt.usable} steps to measure, and {_FEWEST_USABLE} are needed"
            return f"{few}; give it more data, or another epoch"
        return ""

    def _end(self, why: str) -> None:
        if self.state is State.OVER:
            return
        self.state, self.why_over = State.OVER, why
        self._attempt.order = None
        for worker in self._attempt.workers:
            worker.hang_up()
        self._end_attempt(within=_LEAVING)
