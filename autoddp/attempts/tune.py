"""The tuning job: attempts in the main thread, the study in another, and the live job's events between them."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import Protocol

from autoddp.attempts.communication import Enough, diagnosed
from autoddp.attempts.env_screening import Screening
from autoddp.attempts.isolating import Isolation
from autoddp.attempts.job.deadline import Deadline
from autoddp.attempts.job.journal import Journal
from autoddp.attempts.job.live_job import LiveJob
from autoddp.attempts.job.machine import NO_DDP, TOO_SHORT
from autoddp.attempts.keeper import Attempt
from autoddp.attempts.limits import Limits, Written
from autoddp.attempts.preparation import Preparation, await_ports
from autoddp.attempts.rank_states import NOT_BEGUN, Waiting
from autoddp.attempts.resuming import cut_off, going_on, job_now, killed_again, study_begins, study_is_over
from autoddp.codec import decode, encode
from autoddp.commandline.options import Options
from autoddp.diagnose import Diagnosis, Examination, MeasureAnatomy, Surroundings
from autoddp.diagnose.collectives import CommunicationDiagnosis, recorded
from autoddp.diagnose.collectives.table import Row, beside_ddp, table
from autoddp.errors import AutoddpError, HostLost
from autoddp.files import write_private
from autoddp.hosts.presence import HostsGone
from autoddp.hosts.together import Hosts, Next
from autoddp.isolation import Level
from autoddp.isolation.ports import noted_ports
from autoddp.isolation.trackers import TRACKERS_OFF, why_not
from autoddp.knobs import AS_WRITTEN
from autoddp.knobs.computing import THREADS
from autoddp.log import get_logger
from autoddp.network.own_network import on_one_host
from autoddp.processes.silence import awaiting
from autoddp.runs import nccl_logs
from autoddp.runs.folder import CALLS
from autoddp.runs.rank_logs import LogKeeper
from autoddp.settings import StudySettings
from autoddp.study import INTERRUPTED, Observer, Outcome, Study, TrialFailed, TuningOver
from autoddp.timing import Difference
from autoddp.timing.timeline import Timeline
from autoddp.units import duration
from autoddp.wire import JobFacts, WorkerConfig
from autoddp.wire.recorded_calls import VARIABLE as RECORDS
from autoddp.wire.recorded_calls import RecordingPlan

logger = get_logger(__name__)

_TRACED = 5  # steps of a trace
_BEFORE_TRACE = 8  # steps before it: experiments have left batches waiting in the loaders' queues
_DIAGNOSING = 90.0  # seconds of steps for a diagnosis that is all that is asked for
_LONGEST_DIAGNOSIS = 900.0  # seconds from the command, all starts of the script included


@dataclass
class Tuned:
    """What came of tuning, the same on all hosts.

    `recipe` is the text that every node writes; "" when there is none, and `why` says why.
    """

    recipe: str = ""
    diagnosis: Diagnosis | None = None
    """Why the job is slow, where that was all that was asked for."""
    timelines: tuple[Timeline, ...] = ()
    """Some steps of each rank, recorded after that diagnosis."""
    outcome: Outcome | None = None
    """The study, made here or by the launcher that led."""
    why: str = ""
    built_ddp: bool = False
    """Whether the script has built a DDP model on some host."""
    wall_seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Answer:
    """`Tuned` as the launcher that leads tells it the others."""

    tuned: Tuned
    diagnosis: Diagnosis | None
    """The study's diagnosis, apart because `study` knows no more of its type than what it needs."""

    @classmethod
    def of(cls, tuned: Tuned) -> _Answer:
        outcome = tuned.outcome
        if outcome is None or outcome.diagnosis is None:
            return cls(tuned, None)
        assert isinstance(outcome.diagnosis, Diagnosis)
        return cls(replace(tuned, outcome=replace(outcome, diagnosis=None)), outcome.diagnosis)

    @property
    def whole(self) -> Tuned:
        outcome = self.tuned.outcome
        return replace(self.tuned, outcome=outcome and replace(outcome, diagnosis=self.diagnosis))


class Reporter(Protocol):
    """Who tells the user of a tuning job, and writes the recipe."""

    @property
    def observer(self) -> Observer:
        """Hears of each trial."""

    def progress(self, cause: str, number: int, of: int) -> None:
        """Experiment `number` of a diagnosis begins."""

    def say(self, text: str) -> None:
        """Show a line."""

    def warn(self, text: str) -> None:
        """Show a line that must not be overlooked."""

    def recipe(self, outcome: Outcome, inputs: tuple[str, ...]) -> str:
        """The study is over: the recipe's text, or "" where too little was measured for one.

        `inputs`: what the models were called with, see `recipe.inputs`.
        """


@dataclass
class Tuning:
    """One tuning job; `run()` does it."""

    options: Options
    preparation: InitVar[Preparation]
    hosts: Hosts
    reporter: Reporter
    interfaces: str = ""
    """See `WorkerConfig`."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """See `Network`."""
    began: float = field(default_factory=time.monotonic)
    """When the command was given, by `time.monotonic()`."""

    def __post_init__(self, preparation: Preparation) -> None:
        self._folder = preparation.folder
        self._keeper = preparation.keeper
        self._isolation = preparation.isolation  # of the next attempt
        self.job = job_now(self.options)
        """What is tuned, as it was before: the user may change the files of the script meanwhile."""
        # The hosts have met: no start of the script waits for further ones, where --nnodes is a range.
        self._torchrun = copy.copy(self.options.torchrun)
        self._torchrun.nnodes, self._torchrun.node_rank = str(self.hosts.nodes), self.hosts.rank
        self._own_network = {} if self.hosts.several else on_one_host(os.environ)
        self.communication: CommunicationDiagnosis | None = None
        """What the script communicates by itself, and why it takes so long; None where it was not asked for."""
        self.own_collectives: Sequence[Row] = ()
        """What a script with DDP calls beside DDP, in the blocks of a diagnosis as written; the ranks of this host."""
        self.joining = 0
        """Ranks of this host that waited for processes of their own when the last attempt ended."""
        self.deadline = self._usual_deadline()
        self._place = self._folder.path  # of the last attempt
        self._ended = 0.0  # when that was ended or has failed; 0 where the script has ended by itself

    def run(self) -> Tuned:
        """Run the study on the live script.

        Never raises for anything the script does. Where a signal's handler raises, everything ends first but the
        present attempt, which is the keeper's.
        """
        tuned = Tuned(why=self._why_not())
        if tuned.why:
            self.hosts.end(tuned.why)
            return self._agreed(tuned, leads=False)
        if not self.options.diagnose_only:
            study_begins(self._folder, self.job, self.options.study, None)
        began = time.perf_counter()
        job = LiveJob(self._folder.socket, Journal(self._folder.journal), self.deadline, self.hosts.waited)
        environment = {**os.environ, **self._own_network}
        screening = Screening(self._torchrun, self._folder.path / "screening", environment, self.hosts)
        arguments = (job, screening, tuned, began)
        thread = threading.Thread(target=self._study, args=arguments, name="autoddp-study", daemon=True)
        try:
            thread.start()
            with LogKeeper(self._folder.path / "screening"), awaiting(lambda: job.machine.in_words):
                self._make_attempts(job)
        except BaseException as error:
            is_fault = isinstance(error, Exception) and not isinstance(error, AutoddpError)
            why = f"{self.options.activity} itself failed: {error!r}" if is_fault else INTERRUPTED
            # The study must know before the ranks are gone, here or on other hosts.
            job.give_up(why)
            if not is_fault:
                self.hosts.leave(error)
                raise
            # Such as a limit of this user's on threads: it must not cost the job, for which it may be enough.
            logger.exception("tuning failed")
            self.hosts.end(why)
        finally:
            job.give_up(INTERRUPTED)  # without effect where tuning is over
            screening.stop()
            if thread.ident is not None:
                thread.join()
            job.close()
        tuned.built_ddp, tuned.why = job.machine.built_ddp, tuned.why or job.machine.why_over
        tuned.wall_seconds["total"] = time.perf_counter() - began
        if self.options.diagnose_only and not tuned.built_ddp:
            self.communication = self._diagnosed_without_ddp("" if tuned.why in (NO_DDP, TOO_SHORT) else tuned.why)
        if self.options.diagnose_only and tuned.diagnosis is not None:
            self.own_collectives = table(recorded(self._place / CALLS))
            said = tuned.diagnosis
            proved = max((one.seconds for one in said.findings if one.status == "proved"), default=0.0)
            found = proved / said.seconds if said.seconds else 0.0
            verdict = beside_ddp(said.verdict, found, self.own_collectives, said.seconds)
            tuned.diagnosis = replace(said, verdict=verdict)
        tuned = self._agreed(tuned, job.machine.leads is True)
        study_is_over(self._folder)
        return tuned

    def _why_not(self) -> str:
        """Why nothing is tuned, or diagnosed, from the beginning; "" where it is."""
        again = not (self.options.fresh or self.options.diagnose_only)
        return why_not(os.environ) or (killed_again(self._folder, self.job, self.options.study) if again else "")

    def _diagnosed_without_ddp(self, failure: str) -> CommunicationDiagnosis | None:
        environment = {**os.environ, **self._own_network}
        replay, budget = self._folder.path / "replay", self.options.diagnose_budget or _DIAGNOSING
        self.reporter.observer.recording()  # the script may have ended before anyone saw a call
        try:
            say, until = self.reporter.say, self._ended
            found = diagnosed(
                self._place / CALLS,
                replay,
                environment,
                budget,
                say,
                self.rates,
                until,
                since=self.began,
                over=lambda: self.deadline.ended,
            )
        except BaseException as error:  # such as a signal: the others would wait for a minute and a half
            self.hosts.leave(error)
            raise
        if found is None or not failure:
            return found
        return replace(found, not_measured=[*found.not_measured, f"what would have come later: {failure}"])

    def _usual_deadline(self) -> Deadline:
        if self.options.budget is not None or not self.options.diagnose_only:
            return Deadline(self.options.budget, self.began, by_length=self.options.trials is None)
        why_over = f"{self.options.activity} has taken {duration(_LONGEST_DIAGNOSIS)}; --budget allows more"
        return Deadline(_LONGEST_DIAGNOSIS, self.began, why_over=why_over)

    def _agreed(self, tuned: Tuned, leads: bool) -> Tuned:
        """What all hosts have come to, so that all launch with the same recipe, or none with one.

        HostLost where too few are left. Where nothing is to be launched, what was found stands on those that are left.
        """
        why_over = self.hosts.why_over
        is_found = tuned.diagnosis is not None or self.communication is not None
        if is_found and why_over:
            self.hosts.leave(why_over)
            self.reporter.warn(f"the diagnosis ended early: {why_over}")
            return tuned
        mine = encode(_Answer.of(tuned)) if leads and self.hosts.several else ""
        try:
            answer, built_ddp = self.hosts.one_answer(mine, tuned.built_ddp, self.reporter.say, leads)
        except BaseException as error:
            self.hosts.leave(error)
            if not is_found or not isinstance(error, HostLost):
                raise
            self.reporter.warn(f"the diagnosis ended early: {error}")
            return tuned
        if self.options.tune_only:  # else the hosts have yet to launch the job together
            self.hosts.close()
        if self.hosts.several and not answer:
            tuned = replace(tuned, recipe="")
        elif not leads and answer:
            tuned = self._told(answer, tuned)
        return replace(tuned, built_ddp=built_ddp)

    def _told(self, answer: str, mine: Tuned) -> Tuned:
        """What the launcher that leads has said. Of another version of autoddp only the recipe may be readable."""
        try:
            return decode(answer, _Answer).whole
        except ValueError:
            self.reporter.warn("what the leading host has found cannot be read by this version of autoddp; see there")
            return replace(mine, recipe=str(json.loads(answer)["tuned"]["recipe"]))

    def _study(self, job: LiveJob, screening: Screening, tuned: Tuned, began: float) -> None:
        """The study's thread; where another host leads, it does what it is told. `began`: by `time.perf_counter()`."""
        try:
            facts, settings = job.facts(), self.options.study
            if not job.machine.leads:
                self._follow(job, screening, facts)
                return
            self.hosts.tell("name", self.hosts.name)
            tuned.wall_seconds["start-up"] = time.perf_counter() - began
            if self.options.diagnose_only:
                tuned.diagnosis = self._examined(job, facts)
                with contextlib.suppress(TuningOver, TrialFailed):  # the script may have ended; the diagnosis stands
                    tuned.timelines = job(AS_WRITTEN, _BEFORE_TRACE, 0, timeline=_TRACED).timelines
                with contextlib.suppress(TuningOver):
                    job.finish()
                return
            self._go_on_with_one_that_was_cut_off(job, settings, facts)
            study = Study(
                job,
                facts,
                settings,
                self.reporter.observer,
                lambda tried: screening(facts, tried),
                lambda measure, budget, reduction: self._examination(measure, facts, budget, reduction).run(),
            )
            tuned.outcome = study.run()
            tuned.wall_seconds["start-up"] += job.machine.waited
            tuned.recipe = self.reporter.recipe(tuned.outcome, job.inputs)
            if not tuned.outcome.ended:
                job.finish()
        except TuningOver as over:
            tuned.why = str(over)
            job.give_up(tuned.why)  # without effect, unless the study itself has seen that there is no time for it
        except TrialFailed as failed:
            tuned.why = f"{failed} (seen in steps as written)"
            job.give_up(tuned.why)
        except Exception as error:
            logger.exception("the study failed")
            tuned.why = f"{self.options.activity} itself failed: {error!r}"
            job.give_up(tuned.why)

    def _follow(self, job: LiveJob, screening: Screening, facts: JobFacts) -> None:
        """Another launcher leads: keep what it measures, and start this host's parts of what it asks for."""
        if not self.options.diagnose_only:
            study_begins(self._folder, self.job, self.options.study, facts)
        if name := self.hosts.await_told("name", str, lambda: job.machine.over):
            self.reporter.say(f"{name} leads {self.options.activity}: its lines tell how it goes")
        screening.follow(lambda: job.machine.over)

    def _examined(self, job: LiveJob, facts: JobFacts) -> Diagnosis:
        """Find out by experiments why the job is slow. Nothing is tuned."""
        self.reporter.observer.ready(facts)
        budget = self.options.diagnose_budget or _DIAGNOSING
        return self._examination(functools.partial(job, anatomy=True), facts, budget).run()

    def _examination(
        self, measure: MeasureAnatomy, facts: JobFacts, budget: float, reduction: Difference | None = None
    ) -> Examination:
        alone = self.options.diagnose_only  # before trials, a script's steps are for the trials
        around, tell = Surroundings(facts, is_tuned=not alone), self.reporter.progress
        return Examination(
            measure, around, budget, fails=TrialFailed, ends=TuningOver, tell=tell, reduction=reduction, precise=alone
        )

    def _go_on_with_one_that_was_cut_off(self, job: LiveJob, settings: StudySettings, facts: JobFacts) -> None:
        if job.machine.leads and not self.options.fresh:  # the host that leads tells the others what they have missed
            name, entries = cut_off(self._folder, self.job, settings, facts)
            if entries:
                self.reporter.say(going_on(name, len(entries)))
                job.take_over(entries)
        study_begins(self._folder, self.job, settings, facts)

    def _make_attempts(self, job: LiveJob) -> None:
        number, more = 0, Next(True)
        try:
            self._isolate(self.hosts.worst(self._isolation.level, self.reporter.say), "another host has none")
        except HostsGone as gone:
            job.give_up(str(gone))
            return
        except (RuntimeError, TimeoutError) as error:
            job.give_up(f"the other hosts do not answer: {error}")
            return
        (self.reporter.warn if self._isolation.level is Level.OFF else self.reporter.say)(
            self._isolation.says(self.options.activity)
        )
        while more.more:
            failure = self._make_attempt(number, job, more.variables)
            # Ranks that are killed some time after the script has ended have not failed, for the other hosts either.
            why = failure and (job.machine.cause or failure)  # elastic knows the exit code alone
            self.hosts.attempt_ended(number, "" if job.machine.ended_by_us else why)
            more = self._goes_on(number, job, failure)
            number += 1

    def _make_attempt(self, number: int, job: LiveJob, wanted: Mapping[str, str]) -> str:
        """One attempt to its end, with the variables that are `wanted`; "" or why it failed.

        None is made where tuning is over.

        Tuning is over too where the attempt's files cannot be made: the disk is full, or the run's folder was removed.
        The job needs none of them.
        """
        try:
            return self._attempt(number, job, wanted)
        except OSError as error:
            self._cannot_start(job, self._folder.why_not_written(error))
            return ""

    def _cannot_start(self, job: LiveJob, why: str) -> None:
        """Tuning is over. The others hear of it at once: under guard they wait for this host's part of the start."""
        job.give_up(why)
        self.hosts.end(why)

    def _attempt(self, number: int, job: LiveJob, wanted: Mapping[str, str]) -> str:
        if why := self._isolation.why_not_started(self._torchrun):
            self._cannot_start(job, why)
            return ""
        await_ports(noted_ports(str(self._folder.sockets)), job.machine.at_most)
        place = self._place = self._folder.attempt(number)
        written = self._where_writes_go(number, place)
        if not job.attempt_begins(number, place / "heartbeats", wanted):
            return ""
        attempt = self._attempt_with(number, place, written, wanted)
        limits = Limits(
            job=job,
            written=Written(self._isolation, self.options.activity),
            hosts=self.hosts,
            number=number,
            waiting=Waiting(place / "heartbeats"),
            keeper=self._keeper.pid,
            activity=self.options.activity,
            say=self.reporter.say,
            recording=self.reporter.observer.recording,
            enough=Enough(place / CALLS) if self.options.diagnose_only else None,
        )
        with LogKeeper(place), awaiting(limits.in_words):
            failure = self._keeper.run(attempt, limits.rank_ended, limits.exceeded)
        self.joining = limits.waiting.joining
        self._ended = limits.ended_at or (time.perf_counter() if failure else 0.0)
        if failure and limits.is_enough_elsewhere:
            job.give_up(NO_DDP)
        if not (failure or limits.waiting.has_begun or job.machine.built_ddp):
            job.give_up(NOT_BEGUN)
        return failure

    def _attempt_with(self, number: int, place: Path, written: Path, wanted: Mapping[str, str]) -> Attempt:
        """An attempt with the variables that are `wanted`; `place` is its folder, `written`: see `_where_writes_go`."""
        if self._isolation.level is Level.GUARD:  # the folders of an overlay are known to the keeper from its beginning
            self._keeper.removes([str(place / "written"), str(self._isolation.caches)])
        return Attempt(
            self._torchrun,
            place,
            number,
            {**os.environ, **self._variables(place, written), **nccl_logs.variables(place, wanted), **wanted},
            self._isolation.shelter(number, place, written),
        )

    def _where_writes_go(self, number: int, place: Path) -> Path:
        """Under guard, a folder for what the script writes: the first host's, where this one can reach it."""
        own = place / "written"
        if self._isolation.level is not Level.GUARD:
            return own
        if number:
            self._folder.forget_what_was_written(number - 1)
        own.mkdir(mode=0o700)
        token = own.parent / "token"
        write_private(token, place.parent.name)
        first = Path(self.hosts.of_the_first(f"attempt{number}/written", str(own), self.reporter.say) or own)
        with contextlib.suppress(OSError):
            # A folder of that name that is not the first host's says another word, or nothing.
            theirs = first.parent / "token"
            is_ours = os.lstat(theirs).st_uid == os.lstat(token).st_uid  # another user may guess the names
            if is_ours and theirs.read_text(encoding="utf-8") == first.parent.parent.name:
                return first
        return own

    def _goes_on(self, number: int, job: LiveJob, failure: str) -> Next:
        """Whether all hosts make another attempt, and how; they then have the same isolation."""
        level = self._isolation.level
        # On several hosts each has an overlay of its own: a script may wait in vain there for a file of another host's.
        more = job.attempt_ended(failure, level is Level.OVERLAY and self.hosts.several and number == 0)
        if level is Level.OVERLAY and job.machine.overlay_failed:
            if self.options.isolation is Level.OVERLAY:
                job.give_up(job.machine.overlay_failed)
                more = False
            else:
                level = Level.GUARD
        wanted = Next(more, job.machine.why_over or job.machine.overlay_failed, level, job.machine.wanted)
        together = self.hosts.agree(number, wanted, self.reporter.say)
        if not together.more:
            job.give_up(together.why or f"another host has ended {self.options.activity}")
        elif together.level is not self._isolation.level:
            self._isolate(together.level, f"the script failed under it: {together.why}")
            self.reporter.say(f"another attempt; {self._isolation.says(self.options.activity)}")
        return together

    def _isolate(self, level: Level, why: str) -> None:
        if level is not self._isolation.level:
            self._isolation = self._isolation.under_guard(why) if level is Level.GUARD else Isolation.off(self._folder)

    @property
    def _records(self) -> bool:
        """Whether a script without DDP runs on, and its collectives and steps are recorded."""
        return self.options.diagnose_only

    @property
    def _binds(self) -> str:
        """See `WorkerConfig.binds`."""
        return ""

    @property
    def _more_variables(self) -> dict[str, str]:
        """What else the script must have so that it can be measured."""
        return {}

    def _variables(self, place: Path, written: Path) -> dict[str, str]:
        """What an attempt's processes get beside the launcher's own environment."""
        config = WorkerConfig(
            socket=self._folder.socket,
            scratch=str(place),
            threads_pinned=f"{THREADS.variable} is set" if THREADS.variable in os.environ else "",
            interfaces=self.interfaces,
            measured=str(self.options.output.absolute()),
            accumulates=self.options.study.accumulate_up_to > 1,
            cuda_graphs=self.options.cuda_graphs,
            recompiles=self.options.recompile,
            local_buffers=self.options.local_buffers,
            static_graph=self.options.static_graph,
            diagnoses=self._records,
            binds=self._binds,
        )
        return {
            "AUTODDP_TUNING": "1",
            **({RECORDS: RecordingPlan(str(place / CALLS)).text} if self._records else {}),
            **TRACKERS_OFF,
            **self._more_variables,
            **self._own_network,
            **self._isolation.variables(place, written, os.environ),
            **config.environment(os.environ),
        }
