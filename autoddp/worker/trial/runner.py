"""The trial runner: between two steps of the running model it takes an order, applies it, warms up and times steps.

A `Director` gives the orders on rank 0 and gets the results: the launcher's study, or a test.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from autoddp.codec import convert, encode, plain, replace
from autoddp.knobs import Configuration, GradientError
from autoddp.recipe import merged
from autoddp.timing.anatomy import RankSteps
from autoddp.timing.timeline import Timeline
from autoddp.wire import BlockDone, Experiment, Finish, JobFacts, LauncherClient, Measure, Message, Ready
from autoddp.worker.observe.stopwatch import Stopwatch
from autoddp.worker.process.clock_offset import ClockOffset, mean_of
from autoddp.worker.process.device import finish_queued_work
from autoddp.worker.process.ending import PATIENCE, leave
from autoddp.worker.process.rank_store import RankStore

_BEFORE_TIMELINE = 1  # steps with all hooks on before any is recorded: the first call of each takes longer
_AFTER_TIMELINE = 2  # steps until a new reducer has rebuilt its buckets
_TIMELINES = 4 * 2**20  # bytes of all ranks' timelines in a journal entry, unless that of rank 0 alone takes more
_RESTS = 2.0  # seconds without an order: the communication benchmark may be at work, on the same devices
_TIMED_AGAIN = 4  # times that steps are timed again at most: a script whose shapes change may never stop compiling


class LiveModel(Protocol):
    """A training job whose knobs can be set between two steps.

    Not promised: that parameters stay equal on all ranks while `reduce(False)` holds.
    """

    def only_what_all_have(self, ranks: RankStore) -> object:
        """Leave out models that some rank has freed already. The others stay at least as long as the result.

        What follows may communicate for each model. Python frees a model that the script has dropped at another moment
        on each rank.
        """

    def apply(self, configuration: Configuration) -> None:
        """Bring `configuration` into effect from the next forward on; every rank calls it at the same step boundary."""

    def reduce(self, on: bool) -> None:
        """Switch gradient reduction off, as under `no_sync`, or on again, which broadcasts the parameters of rank 0."""

    def compare(self, on: bool) -> None:
        """From the next step on, reduce gradients by the hook and also exactly; or by the hook alone again."""

    def experiment(self, experiment: Experiment | None) -> None:
        """Bring `experiment` into effect from the next step on, and undo the one before it. None: no more of them."""

    def record_stages(self) -> None:
        """Record the stages of the steps from here on."""

    def step_recorded(self) -> None:
        """A step has ended."""

    def recorded(self) -> RankSteps:
        """Record no more; what was recorded, with the seconds of each step left out."""

    def prepare_timeline(self) -> None:
        """Get ready to record a timeline; `begin_timeline` comes after a step or more."""

    def begin_timeline(self) -> None:
        """Record a timeline of the steps from here on."""

    def step_of_timeline(self) -> None:
        """A step has ended while a timeline is recorded."""

    def end_timeline(self) -> Timeline:
        """Record no more; what was recorded, with `began` on this rank's own clock."""

    def step_compared(self) -> None:
        """A step has ended while gradients are compared."""

    def gradient_error(self) -> GradientError | None:
        """The gradient error over the steps compared since the last call; None where no hook of ours is in effect."""

    @property
    def compilations(self) -> int:
        """How often something was compiled in this process so far: a step in which that happens is not timed."""

    def synchronize(self) -> None:
        """Wait until the device has done all work queued so far; nothing to do on a CPU."""

    def rest(self) -> None:
        """No step is made for a while, so others may have what memory is to spare. Called by another thread."""


class Director(Protocol):
    """Gives rank 0 its orders; the other methods serve every rank."""

    def next(self, done: BlockDone | None) -> Message:
        """Hand over the last block (None at first) and wait for the next order. Called on rank 0."""

    def heard(self, done: BlockDone) -> None:
        """A block of rank 0's, as broadcast to all ranks. Called on the other ranks."""

    def finish(self, order: Finish) -> None:
        """The study is over. Called on every rank."""


class LauncherDirector:
    """Gets orders from the study in the launcher. Local rank 0 of every other node reports to its own launcher."""

    def __init__(self, launcher: LauncherClient, facts: JobFacts) -> None:
        self._launcher = launcher
        self._facts = facts
        self._reports = launcher.local_rank == 0 and launcher.rank != 0
        if self._reports:
            launcher.send(Ready(facts, launcher.steps))

    def next(self, done: BlockDone | None) -> Message:
        """See `Director`. Where the launcher has ended, all ranks leave."""
        try:
            self._launcher.send(Ready(self._facts, self._launcher.steps) if done is None else done)
            return self._launcher.receive()
        except (EOFError, OSError):
            return Finish()

    def heard(self, done: BlockDone) -> None:
        """See `Director`."""
        if self._reports:
            self._launcher.send(done)

    def finish(self, order: Finish) -> None:
        """See `Director`."""
        if self._reports:
            self._launcher.send(order)
        leave()


class TrialRunner:
    """Call `begin()` at a step boundary, then `on_step()` at every one after it."""

    def __init__(
        self,
        model: LiveModel,
        ranks: RankStore,
        director: Director,
        stopwatch: Stopwatch,
        compiles: bool = False,
        inputs: Callable[[], Sequence[str]] = tuple,
        made: Callable[[], int] = int,
        queued: Callable[[], int] = int,
    ) -> None:
        """`inputs`, `made`, `queued`: see `BlockDone`."""
        self._model = model
        self._ranks = ranks
        self._director = director
        self._stopwatch = stopwatch
        self._compiles = compiles
        self._inputs = inputs
        self._made = made
        self._queued = queued
        self._compiled_before = self._compiled_at_start = self._again = 0
        self._steps_left = self._warmup = 0
        self._at_once, self._since_lap = 1, 0
        self._then: Callable[[], None] = lambda: None
        self._lap: Callable[[], None] = lambda: None
        self._order: Measure | None = None
        self._laps: list[float] = []
        self._alone = True
        self._recorded: RankSteps | None = None
        self._timeline: Timeline | None = None
        self._clock_before = ClockOffset()

    def begin(self) -> None:
        """Take the first order; every rank at the same step boundary."""
        self._obey(self._director.next(None) if self._ranks.rank == 0 else None)

    def on_step(self) -> None:
        """A step of the script has ended; several of them may count as one."""
        self._since_lap += 1
        if self._since_lap < self._at_once:
            return
        self._since_lap = 0
        self._lap()
        self._steps_left -= 1
        if self._steps_left == 0:
            self._then()

    def _obey(self, order: Message | None) -> None:
        """Rank 0 gives the order to all ranks; the others pass None."""
        order = self._ranks.broadcast(order)
        if isinstance(order, Finish):
            finish_queued_work(PATIENCE)
            self._ranks.part()
            self._director.finish(order)
            return
        assert isinstance(order, Measure)
        self._start(order)

    def _start(self, order: Measure) -> None:
        warmup = order.warmup
        if self._order is not None and self._order.timeline and self._order.configuration == order.configuration:
            warmup = max(warmup, _AFTER_TIMELINE)  # recording has left new reducers, and nothing else replaces them
        self._order, self._at_once = order, order.at_once
        self._recorded, self._timeline, self._alone = None, None, True
        self._again, self._compiled_at_start = _TIMED_AGAIN, self._model.compilations
        models = self._model.only_what_all_have(self._ranks)
        began = time.perf_counter()
        self._model.experiment(order.experiment if order.anatomy else None)
        if order.apply:
            self._model.apply(order.configuration)
        self._model.reduce(order.reduce)
        self._warm_from = time.perf_counter()
        self._apply_seconds = self._warm_from - began
        del models
        self._lap = lambda: None
        self._warmup = warmup
        self._expect(warmup, self._time)

    def _expect(self, steps: int, then: Callable[[], None]) -> None:
        self._steps_left, self._then = steps, then
        if steps == 0:
            then()

    def _time(self) -> None:
        """The warm-up is over."""
        assert self._order is not None
        if self._warmup:
            self._model.synchronize()
        self._warm_seconds = time.perf_counter() - self._warm_from
        self._compiled_before = self._model.compilations
        if limit := self._order.experiment.by_turns:
            self._alone = self._ranks.wait_for_turn(limit)
        if self._order.anatomy:
            self._model.record_stages()
        self._stopwatch.start()
        self._lap = self._end_of_timed_step
        self._expect(self._order.steps, self._timed)

    def _end_of_timed_step(self) -> None:
        self._stopwatch.lap()
        self._model.step_recorded()

    def _timed(self) -> None:
        """The timed steps are over. If a rank has compiled in them, they count as warm-up and are timed again."""
        assert self._order is not None
        self._laps = self._stopwatch.stop()
        if self._order.anatomy:
            self._recorded = replace(self._model.recorded(), seconds=tuple(self._laps), alone=self._alone)
        if self._order.experiment.by_turns:
            self._ranks.end_turn()
        if self._compiles and self._again:
            self._again -= 1
            if self._compiled_meanwhile():
                self._time()
                return
        self._compare()

    def _compiled_meanwhile(self) -> bool:
        counts = self._ranks.gather([self._model.compilations - self._compiled_before])
        return bool(self._ranks.share(any(count for (count,) in counts)))

    def _compare(self) -> None:
        assert self._order is not None
        self._model.compare(self._order.compare > 0)
        self._lap = self._model.step_compared
        self._expect(self._order.compare, self._prepare_timeline)

    def _prepare_timeline(self) -> None:
        """The compared steps are over."""
        assert self._order is not None
        self._model.compare(False)
        self._lap = lambda: None
        if not self._order.timeline:
            self._report()
            return
        self._clock_before = self._ranks.clock_offset()
        self._model.prepare_timeline()
        self._expect(_BEFORE_TIMELINE, self._record_timeline)

    def _record_timeline(self) -> None:
        assert self._order is not None
        self._model.begin_timeline()
        self._lap = self._model.step_of_timeline
        self._expect(self._order.timeline, self._timeline_recorded)

    def _timeline_recorded(self) -> None:
        found = self._model.end_timeline()
        clock = mean_of(self._clock_before, self._ranks.clock_offset())
        self._timeline = replace(found, began=found.began + clock.seconds, error=clock.error)
        self._lap = lambda: None
        self._report()

    def _report(self) -> None:
        assert self._order is not None
        error = self._model.gradient_error() if self._order.compare else None
        order = self._order
        gathered = self._ranks.gather([self._laps, list(self._inputs()), plain(self._recorded), plain(self._timeline)])
        steps = zip(*(of_rank for of_rank, *_ in gathered), strict=True)
        laps = [[float(lap) / order.at_once for lap in of_ranks] for of_ranks in steps]
        means = tuple(sum(of_step) / len(of_step) for of_step in laps)
        compiled = self._model.compilations - self._compiled_at_start
        done = BlockDone(
            order.index,
            means,
            self._warm_seconds,
            self._apply_seconds,
            measure=order,
            error=error,
            compilations=compiled,
            slowest=tuple(map(max, laps)),
            inputs=merged(*(inputs for _, inputs, *_ in gathered)),
            made=self._made(),
            queued=self._queued(),
            ranks=tuple(convert(recorded, RankSteps) for _, _, recorded, _ in gathered if recorded is not None),
            timelines=_fitting([convert(one, Timeline) for *_, one in gathered if one is not None]),
        )
        # Rank 0's launcher first: no other one may know of a block that this one has missed, and calls failed.
        leads = self._ranks.rank == 0
        with self._resting():
            following = self._director.next(done) if leads else None
            told = self._ranks.broadcast(done if leads else None)
        assert isinstance(told, BlockDone)
        if not leads:
            self._director.heard(told)
        self._obey(following)

    @contextlib.contextmanager
    def _resting(self) -> Iterator[None]:
        """A context in which this rank waits, and lets its model rest if that takes long."""
        timer = threading.Timer(_RESTS, self._model.rest)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _fitting(timelines: Sequence[Timeline]) -> tuple[Timeline, ...]:
    """The timelines, the last ones without gradients where messages and the journal would become too long."""
    found, room = [], _TIMELINES
    for number, one in enumerate(timelines):
        room -= len(encode(one))
        found.append(one if room >= 0 or number == 0 else replace(one, gradients=()))
    return tuple(found)
