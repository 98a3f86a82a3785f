"""The tuning job: attempts in the main thread, the study in another, and the live job's events between them."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from autoddp.isolation import Level
from autoddp.isolation.trackers import TRACKERS_OFF, why_not
from autoddp.knobs import Rung
from autoddp.knobs.computing import THREADS
from autoddp.launch import nccl_logs
from autoddp.launch.deadline import Deadline
from autoddp.launch.env_screening import Screening
from autoddp.launch.hosts import Hosts, Next
from autoddp.launch.isolating import Isolation
from autoddp.launch.journal import Journal
from autoddp.launch.keeper import Attempt, Keeper
from autoddp.launch.live_job import LiveJob
from autoddp.launch.options import DEFAULT_TRIALS, Request
from autoddp.launch.presence import HostsGone
from autoddp.launch.rank_logs import LogKeeper
from autoddp.launch.resuming import Job, cut_off, job_now, study_begins, study_is_over
from autoddp.launch.run_folder import RunFolder
from autoddp.launch.signals import Interrupted
from autoddp.launch.waiting import Waiting
from autoddp.log import get_logger
from autoddp.study import Observer, Outcome, Plan, Study, TrialFailed, TuningOver
from autoddp.units import data_size
from autoddp.wire import JobFacts, WorkerConfig

logger = get_logger(__name__)

_LOOKS = 1.0  # seconds between two looks at how much the script has written
_EFFORT = 20  # a look may take one part in so many of the time: many files take long to count


@dataclass
class Tuned:
    """What came of tuning. `recipe` is the text that every node writes; "" when there is none, and `why` says why."""

    recipe: str = ""
    outcome: Outcome | None = None
    """The study, here or followed along with the node that led it."""
    why: str = ""
    built_ddp: bool = False
    """Whether the script has built a DDP model on some host."""
    cut_short: str = ""
    """Why tuning ended before all final rounds were run, where the recipe rests on those before."""
    wall_seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Preparation:
    """What is made before tuning begins."""

    folder: RunFolder
    keeper: Keeper
    isolation: Isolation
    """The best that this host has, of what was asked for."""


@dataclass
class Tuning:
    """What a tuning job needs beside the request; `run()` does it."""

    request: Request
    folder: RunFolder
    keeper: Keeper
    isolation: Isolation
    """Of the next attempt."""
    hosts: Hosts
    observer: Observer
    write: Callable[[Outcome, tuple[str, ...]], str]
    """Makes the recipe's text of an outcome and the models' inputs, see `recipe.inputs`."""
    say: Callable[[str], None]
    warn: Callable[[str], None]
    """As `say`, for what must not be overlooked."""
    interfaces: str = ""
    """See `WorkerConfig`."""
    began: float = field(default_factory=time.monotonic)
    """When the command was given."""
    _job: Job = field(init=False)

    def __post_init__(self) -> None:
        self._job = job_now(self.request)

    def run(self) -> Tuned:
        """Run the study on the live script.

        Never raises for anything the script does. Where a signal's handler raises, everything ends first but the
        present attempt, which is the keeper's.
        """
        tuned = Tuned(why=why_not(os.environ))
        if tuned.why:
            self.hosts.end(tuned.why)
            self._agree_on_the_recipe(tuned, built_ddp=tuned.built_ddp)
            return tuned
        began = time.perf_counter()
        job = LiveJob(self.folder.socket, Journal(self.folder.journal), Deadline(self.request.budget, self.began))
        screening = Screening(self.request.torchrun, self.folder.path / "screening", dict(os.environ))
        arguments = (job, screening, tuned, began)
        thread = threading.Thread(target=self._study, args=arguments, name="autoddp-study", daemon=True)
        thread.start()
        try:
            with LogKeeper(self.folder.path / "screening"):
                self._make_attempts(job)
        except BaseException as error:
            # The study must know before the ranks are gone, here or on other hosts.
            job.give_up("interrupted")
            self._leave(error)
            raise
        finally:
            job.give_up("interrupted")  # without effect where tuning is over
            screening.stop()
            thread.join()
            job.close()
        if tuned.recipe and not self.hosts.several:
            tuned.cut_short = job.machine.why_over
        if job.machine.finished is not None:
            tuned.recipe = job.machine.finished.recipe or tuned.recipe  # the leading host's, the same everywhere
        self._agree_on_the_recipe(tuned, job.machine.built_ddp)
        study_is_over(self.folder)
        tuned.wall_seconds["total"] = time.perf_counter() - began
        return tuned

    def _agree_on_the_recipe(self, tuned: Tuned, built_ddp: bool) -> None:
        """All hosts launch with the same recipe, or none of them with one; HostLost where too few are left."""
        try:
            tuned.recipe, tuned.built_ddp = self.hosts.one_recipe(tuned.recipe, built_ddp, self.say)
        except BaseException as error:
            self._leave(error)
            raise
        self.hosts.close()

    def _leave(self, error: BaseException) -> None:
        self.hosts.leave(error.name if isinstance(error, Interrupted) else f"it failed: {error}")

    def _study(self, job: LiveJob, screening: Screening, tuned: Tuned, began: float) -> None:
        """The study's thread. `began`: by `time.perf_counter()`."""
        try:
            facts, plan = job.facts(), _plan(self.request)
            tuned.wall_seconds["start-up"] = time.perf_counter() - began
            self._go_on_with_one_that_was_cut_off(job, plan, facts)
            study = Study(job, facts, plan, self.observer, lambda settings: screening(facts, settings))
            tuned.outcome = study.run()
            tuned.wall_seconds["start-up"] += job.machine.waited
            recipe = self.write(tuned.outcome, job.inputs)
            job.finish(recipe)
            tuned.recipe = recipe
        except TuningOver as over:
            tuned.why = str(over)
        except TrialFailed as failed:
            tuned.why = f"the script fails as written: {failed}"
            job.give_up(tuned.why)
        except Exception as error:
            logger.exception("the study failed")
            tuned.why = f"the study itself failed: {error!r}"
            job.give_up(tuned.why)

    def _go_on_with_one_that_was_cut_off(self, job: LiveJob, plan: Plan, facts: JobFacts) -> None:
        # The host that leads tells the others what they have missed.
        name, entries = (
            cut_off(self.folder, self._job, plan, facts) if job.machine.leads and not self.request.fresh else ("", ())
        )
        if entries:
            self.say(
                f"going on with the study of {name}, cut off after {len(entries)} measurements; --fresh begins anew"
            )
            job.take_over(entries)
        study_begins(self.folder, self._job, plan, facts)

    def _make_attempts(self, job: LiveJob) -> None:
        number, more = 0, True
        try:
            self._isolate(self.hosts.worst(self.isolation.level, self.say), "another host has none")
        except HostsGone as gone:
            job.give_up(str(gone))
            return
        except (RuntimeError, TimeoutError) as error:
            job.give_up(f"the other hosts do not answer: {error}")
            return
        (self.warn if self.isolation.level is Level.OFF else self.say)(self.isolation.says)
        while more:
            failure = self._make_attempt(number, job)
            self.hosts.attempt_ended(number, failure)
            more = self._goes_on(number, job, failure)
            number += 1

    def _make_attempt(self, number: int, job: LiveJob) -> str:
        """One attempt to its end; "" or why it failed. None is made where tuning is over."""
        place = self.folder.attempt(number)
        written = self._where_writes_go(number, place)
        wanted = job.attempt_begins(number, place / "heartbeats")
        if wanted is None:
            return ""
        attempt = Attempt(
            self.request.torchrun,
            place,
            number,
            {**os.environ, **self._variables(place, written), **nccl_logs.variables(place, wanted), **wanted},
            self.isolation.shelter(number, place, written),
        )
        waiting = Waiting(place / "heartbeats", self.say)
        ended_elsewhere = functools.partial(self.hosts.ended_elsewhere, number)
        limits = _Limits(job, self.isolation, self.hosts, ended_elsewhere, waiting)
        with LogKeeper(place):
            return self.keeper.run(attempt, lambda end: job.rank_ended(end.pid, end.how), limits.exceeded)

    def _where_writes_go(self, number: int, place: Path) -> Path:
        """Under guard, a folder for what the script writes: the first host's, where this one can reach it."""
        own = place / "written"
        if self.isolation.level is not Level.GUARD:
            return own
        own.mkdir(mode=0o700)
        (own.parent / "token").write_text(place.parent.name, encoding="utf-8")
        first = Path(self.hosts.of_the_first(f"attempt{number}/written", str(own), self.say) or own)
        with contextlib.suppress(OSError):
            # A folder of that name that is not the first host's says another word, or nothing.
            if (first.parent / "token").read_text(encoding="utf-8") == first.parent.parent.name:
                return first
        return own

    def _goes_on(self, number: int, job: LiveJob, failure: str) -> bool:
        """Whether all hosts make another attempt; they then have the same isolation."""
        level = self.isolation.level
        # On several hosts each has an overlay of its own: a script may wait in vain there for a file of another host's.
        more = job.attempt_ended(failure, level is Level.OVERLAY and self.hosts.several and number == 0)
        if level is Level.OVERLAY and job.machine.overlay_failed:
            if self.request.isolation is Level.OVERLAY:
                job.give_up(job.machine.overlay_failed)
                more = False
            else:
                level = Level.GUARD
        wanted = Next(more, job.machine.why_over or job.machine.overlay_failed, level)
        together = self.hosts.agree(number, wanted, self.say)
        if not together.more:
            job.give_up(together.why or "another host has ended the tuning")
        elif together.level is not self.isolation.level:
            self._isolate(together.level, f"the script failed under it: {together.why}")
            self.say(f"another attempt; {self.isolation.says}")
        return together.more

    def _isolate(self, level: Level, why: str) -> None:
        if level is not self.isolation.level:
            self.isolation = self.isolation.under_guard(why) if level is Level.GUARD else Isolation.off(self.folder)

    def _variables(self, place: Path, written: Path) -> dict[str, str]:
        """What an attempt's processes get beside the launcher's own environment."""
        config = WorkerConfig(
            socket=self.folder.socket,
            scratch=str(place),
            threads_pinned=f"{THREADS.variable} is set" if THREADS.variable in os.environ else "",
            interfaces=self.interfaces,
            measured=str(self.request.output.absolute()),
            accumulates=(self.request.accumulate_up_to or 1) > 1,
            cuda_graphs=self.request.cuda_graphs,
            recompiles=self.request.recompile,
        )
        return {
            "AUTODDP_TUNING": "1",
            **TRACKERS_OFF,
            **self.isolation.variables(place, written, os.environ),
            **config.environment(os.environ),
        }


class _Limits:
    """Whether an attempt must be stopped: it is of no use any more, or it writes too much."""

    def __init__(
        self,
        job: LiveJob,
        isolation: Isolation,
        hosts: Hosts,
        ended_elsewhere: Callable[[], str | None],
        waiting: Waiting,
    ) -> None:
        self._hosts = hosts
        self._waiting = waiting
        self._ended_elsewhere = ended_elsewhere
        self._job = job
        self._isolation = isolation
        self._looked = 0.0

    def exceeded(self) -> bool:
        """Asked every half second."""
        if self._job.machine.attempt_must_end:
            return True
        if self._hosts.why_over:
            self._job.give_up(self._hosts.why_over)
            return True
        elsewhere = self._ended_elsewhere()
        if elsewhere:
            self._job.ended_elsewhere(elsewhere)
            return True
        self._look_at_what_is_written()
        unmoved = ""
        if self._job.machine.is_starting:
            unmoved = self._waiting.look()
        elif self._job.machine.follows:
            unmoved = self._waiting.look_in_silence()
        if unmoved:
            self._job.give_up(unmoved)
        return bool(unmoved)

    def _look_at_what_is_written(self) -> None:
        limit = self._isolation.limit
        if not limit or self._job.machine.over or time.monotonic() - self._looked < _LOOKS:
            return
        began = time.monotonic()
        written = self._isolation.written()
        self._looked = time.monotonic() + _EFFORT * (time.monotonic() - began)
        if written > limit:
            self._job.give_up(
                f"the script has written {data_size(written)} while it was being tuned, more than --scratch-limit "
                f"({data_size(limit)})"
            )


def _plan(request: Request) -> Plan:
    return Plan(
        trials=DEFAULT_TRIALS if request.trials is None else request.trials,
        allow=request.allow or Rung.NEAR,
        accumulate_up_to=request.accumulate_up_to or 1,
        seed=request.seed,
        limits={Rung.NEAR: request.near_limit, Rung.LOSSY: request.lossy_limit},
    )
