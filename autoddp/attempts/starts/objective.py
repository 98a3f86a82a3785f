"""Tuning for an objective: each measurement of a script without DDP is one start of it, in an attempt of its own.

The starts are isolated as all attempts are. There is no live job and no state machine, because no order is given to a
running script: the launcher reads what the ranks print, or what is recorded of their steps, and ends the start when it
has seen as much as in the first one. The study runs in the main thread, where attempts are made.

On several hosts the first one has the study. It tells the others what each start is made with, and all tell each other
what they have seen of it. So all do the same afterwards.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autoddp.attempts.job.deadline import Deadline
from autoddp.attempts.job.live_job import WorkerServer
from autoddp.attempts.limits import Written
from autoddp.attempts.preparation import await_ports
from autoddp.attempts.resuming import CutOff, starts_cut_off, study_begins, study_is_over
from autoddp.attempts.starts.one_start import OneStart, Seen, cost_of_all
from autoddp.attempts.starts.progress import PrintedNumbers, StepsMade
from autoddp.attempts.starts.start_journal import MeasuredStart, Shown, ShownByHost, StartJournal
from autoddp.attempts.tune import Tuned, Tuning
from autoddp.commandline.local_fingerprint import nccl_here
from autoddp.commandline.mode import torch_version
from autoddp.cpus import usable_cpus
from autoddp.diagnose.collectives import recorded
from autoddp.diagnose.collectives.recording import Recording
from autoddp.errors import AutoddpError, UsageError, first_line
from autoddp.hosts.presence import HostsGone
from autoddp.isolation import Level
from autoddp.isolation.ports import noted_ports
from autoddp.knobs import AS_WRITTEN, BY_NAME, Configuration
from autoddp.knobs.base import Setting
from autoddp.knobs.computing import BINDS_THREADS, NUMA_BINDING, THREADS, thread_counts
from autoddp.knobs.env import NodeAndJob, may_lose_data, start_settings
from autoddp.log import get_logger
from autoddp.processes.signals import Interrupted
from autoddp.processes.silence import awaiting
from autoddp.runs.folder import CALLS
from autoddp.runs.rank_logs import LogKeeper
from autoddp.settings import Objective
from autoddp.study import INTERRUPTED, StartStudy, TrialFailed, TuningOver
from autoddp.topology import fingerprint, free_memory
from autoddp.topology.nccl.conf import as_nccl_sees
from autoddp.topology.nccl.tuner import nccl_tuner
from autoddp.topology.probe import probe
from autoddp.topology.system.machine import usable_nodes
from autoddp.torchrun.options import processes_per_node
from autoddp.wire import JobFacts
from autoddp.wire.job_facts import where_uneven
from autoddp.wire.worker_config import near_which

logger = get_logger(__name__)

NO_MODEL = "no DDP model"
"""What stands in place of the digest of a model's parameters: a job that builds one is another job."""
_TIMES = 5  # as long as the first start: that one filled the caches, so a start that works is no slower
_LEAST_PATIENCE = 60.0  # seconds that any later start has
_NO_BACKEND = "none"


@dataclass(frozen=True)
class _Order:
    """What the host with the study tells the others before each start."""

    more: bool
    """Whether there is one; else the study is over."""
    variables: dict[str, str] = field(default_factory=dict)
    binds: str = ""
    """See `WorkerConfig.binds`."""
    words: str = ""
    """What is measured."""
    as_before: tuple[ShownByHost, ...] = ()
    """What each host's ranks have shown in the first start of the run that is gone on with."""


class ObjectiveTuning(Tuning):
    """The tuning of a script without DDP; `run()` does it."""

    def run(self) -> Tuned:
        """Run the study, a start of the script for each measurement.

        Never raises for anything the script does but for one thing: UsageError where it builds a DDP model.
        """
        tuned, leads = Tuned(why=self._why_not()), self.hosts.rank == 0
        if tuned.why:
            self.hosts.end(tuned.why)
            return self._agreed(tuned, leads=False)
        began = time.perf_counter()
        self._until = Deadline(self.options.budget, self.began, by_length=False)
        self._number = 0
        self._first: OneStart | None = None
        self._shown_first: tuple[ShownByHost, ...] = ()  # in it, by each host
        self._journal = StartJournal(self._folder.journal)
        self._cut_off = CutOff()
        self._saved = 0.0  # seconds of starts that were made before the run was cut off
        self._signal: Interrupted | None = None  # which has ended a start of the study
        try:
            with _heard():
                level = self.hosts.worst(self._isolation.level, self.reporter.say)
            self._isolate(level, "another host has none")
            self.reporter.say(self._isolation.says(self.options.activity))
            if leads:
                self._lead(tuned)
            else:
                self._follow_starts()
        except (TrialFailed, TuningOver) as over:
            tuned.why = str(over)
        except OSError as error:
            tuned.why = self._folder.why_not_written(error)
        except AutoddpError as error:
            self.hosts.leave(error)
            raise
        except Exception as error:
            logger.exception("the study failed")
            tuned.why = f"tuning itself failed: {error!r}"
        except BaseException as error:
            self.hosts.leave(error)
            raise
        tuned.wall_seconds["total"] = time.perf_counter() - began
        if tuned.why:
            self.hosts.end(tuned.why)
        tuned = self._agreed(tuned, leads)
        study_is_over(self._folder)
        return tuned

    def _lead(self, tuned: Tuned) -> None:
        self.hosts.tell("name", self.hosts.name)
        if not self.options.fresh:
            self._cut_off = starts_cut_off(self._folder, self.job, self.options.study)
        study_begins(self._folder, self.job, self.options.study, None)
        study = StartStudy(self._measured, self._left, self.options.study, self.reporter.observer, self._clock)
        try:
            tuned.outcome = study.run(lambda: self._known.facts)
            tuned.recipe = self.reporter.recipe(tuned.outcome, ())
        finally:
            if self._signal is not None:  # no job follows; the reporter has by now what was measured before
                raise self._signal
        self._tell(_Order(more=False))

    def _tell(self, order: _Order) -> None:
        self.hosts.tell(f"start{self._number}", order)

    def _follow_starts(self) -> None:
        """Make this host's part of each start that the first host tells."""
        if name := self.hosts.await_told("name", str, self._is_over_elsewhere):
            self.reporter.say(f"{name} leads {self.options.activity}: its lines tell how it goes")
        while True:
            order = self.hosts.await_told(f"start{self._number}", _Order, self._is_over_elsewhere)
            if order is None or not order.more:
                return
            self._settled(self._seen_by_all(order))

    def _is_over_elsewhere(self) -> bool:
        return bool(self.hosts.why_over)

    @property
    def _objective(self) -> Objective:
        assert self.options.study.objective is not None
        return self.options.study.objective

    @property
    def _records(self) -> bool:
        return True

    @property
    def _binds(self) -> str:
        return self._order.binds

    @property
    def _more_variables(self) -> dict[str, str]:
        # Python keeps what is printed into a log until it has 8 KiB of it, which may be for an hour.
        is_read = not self._objective.of_steps and "PYTHONUNBUFFERED" not in os.environ
        return {"PYTHONUNBUFFERED": "1"} if is_read else {}

    def _left(self) -> float:
        left = self._until.left
        return math.inf if left is None else left

    def _clock(self) -> float:
        return time.perf_counter() + self._saved

    def _measured(self, configuration: Configuration) -> float:
        """Measure by `_start` what the run that was cut off has not measured already."""
        if (earlier := self._journal.answer(configuration)) is not None:
            self._saved += earlier.seconds
            return earlier.result()
        began, is_first = time.perf_counter(), self._first is None
        try:
            cost, failure = self._start(configuration), ""
        except TrialFailed as failed:
            if is_first:
                raise
            cost, failure = None, str(failed)
        made = MeasuredStart(configuration, cost, failure, time.perf_counter() - began)
        if is_first and (earlier := self._begin_journal()) is not None:
            return earlier.result()
        self._journal.add(made)
        return made.result()

    def _begin_journal(self) -> MeasuredStart | None:
        """Begin it after the first start; what that came to in the run that is gone on with, if there is one."""
        shown, before = self._shown(), self._cut_off.shown
        if before is None or not shown.is_of(before):
            self._known = shown
            self._journal.begins(shown)
            return None
        self._known = before
        self.reporter.say(self._cut_off.says)
        self._journal.begins(before, self._cut_off.starts)
        return self._journal.answer(AS_WRITTEN)

    def _shown(self) -> Shown:
        return Shown(self._shown_first, self._facts())

    def _start(self, configuration: Configuration) -> float:
        """What one start with the configuration amounts to. TrialFailed, or TuningOver."""
        if self._first is not None and self._until.why_over:
            raise TuningOver(self._until.why_over)
        words = "as written" if configuration == AS_WRITTEN else f"with {configuration}"
        before = self._cut_off.shown.hosts if self._first is None and self._cut_off.shown is not None else ()
        as_before = before if len(before) == self.hosts.nodes else ()
        binds = near_which(self._known.facts.devices) if NUMA_BINDING.name in configuration else ""
        order = _Order(True, dict(configuration.variables), binds, words, as_before)
        while True:
            self._tell(order)
            try:
                seen = self._seen_by_all(order)
            except Interrupted as signal:  # raised anew by `_lead`: the starts before this one are an answer
                self._signal = signal
                raise TuningOver(INTERRUPTED) from None
            if self._settled(seen):
                return cost_of_all(seen)

    def _seen_by_all(self, order: _Order) -> Sequence[Seen]:
        """Make a start, to its end, and hear what all hosts have seen of it."""
        number = self._number
        start, failure = self._made(order)
        seen = start.seen(failure)
        if not seen.is_useless:
            with awaiting("the ranks of the other hosts"):
                why = start.await_the_others()
            seen = Seen(tuning_over=why) if why else seen
        if seen.is_useless:
            self.hosts.attempt_ended(number, seen.failed)
        with _heard():
            together = self.hosts.exchange(f"attempt{number}/seen", seen, Seen, self.reporter.say)
        if self._first is None and not any(one.is_useless for one in together):
            self._first = start
            self._shown_first = tuple(one.shown for one in together)
            self._until.stepped()  # on this host the ranks may have shown nothing
        return together

    def _settled(self, seen: Sequence[Seen]) -> bool:
        """Whether a start stands; else it has to be made again, under guard. All hosts come to the same.

        UsageError for a script with DDP, TuningOver where it does what cannot be tuned.
        """
        if any(one.builds_ddp for one in seen):
            self.hosts.until_all_have_read()
            raise UsageError(
                f"--objective {self._objective.text}: {self.options.script} builds a DistributedDataParallel "
                "model, whose settings are tuned without this option: leave it out"
            )
        stopped = next((one for one in seen if one.stopped), None)
        is_free = self._isolation.level is Level.OVERLAY and self.options.isolation is not Level.OVERLAY
        why = stopped.stopped if stopped is not None else ""
        if stopped is not None and not (stopped.overlay_is_to_blame and is_free):
            raise TuningOver(why)
        if stopped is None and self._first is None and self.hosts.several and is_free:
            # Each host has an overlay of its own: a script may wait in vain there for a file of another host's.
            why = next((one.failed for one in seen if one.failed), "")
        if not why:
            return True
        self._isolate(Level.GUARD, f"the script failed under it: {why}")
        self.reporter.say(f"another attempt; {self._isolation.says(self.options.activity)}")
        return False

    def _made(self, order: _Order) -> tuple[OneStart, str]:
        """Make this host's part of a start; what was seen of it, and why it has failed, "" if it has not."""
        if why := self._isolation.why_not_started(self._torchrun):
            raise TuningOver(why)
        await_ports(noted_ports(str(self._folder.sockets)), self._until.left)
        number, self._number = self._number, self._number + 1
        place = self._place = self._folder.attempt(number)
        written, self._order = self._where_writes_go(number, place), order
        start = self._watched(number, order)
        attempt = self._attempt_with(number, place, written, order.variables)
        began, server = time.monotonic(), WorkerServer(self._folder.socket, number, start.heard)
        try:
            with LogKeeper(place), awaiting(start.in_words):
                failure = self._keeper.run(attempt, lambda _: None, start.is_over)
                start.look_at_the_rest()  # before the middle of a long log is cut out, and its end is elsewhere
        finally:
            server.close()
        start.seconds = time.monotonic() - began
        if not failure:
            start.is_enough()
        return start, failure

    def _watched(self, number: int, order: _Order) -> OneStart:
        first, place = self._first, self._place
        period = first.progress.period if first is not None and isinstance(first.progress, StepsMade) else None
        return OneStart(
            objective=self._objective,
            as_before=dict(order.as_before[self.hosts.rank].counts) if order.as_before else {},
            progress=StepsMade(place, period) if self._objective.of_steps else PrintedNumbers(self._objective, place),
            needed=first.shown if first is not None else None,
            deadline=self._until,
            written=Written(self._isolation, self.options.activity),
            patience=max(_LEAST_PATIENCE, _TIMES * first.seconds) if first is not None else math.inf,
            folder=place,
            words=order.words,
            hosts=self.hosts,
            number=number,
        )

    def _facts(self) -> JobFacts:
        """What is known of the job after the first start, and the settings that it gives a reason for."""
        recording = recorded(self._place / CALLS)
        started = processes_per_node(self._torchrun)
        of_each = self.hosts.ranks or (started,)
        backends = Counter(group.backend for group in recording.groups)
        backend = backends.most_common(1)[0][0] if backends else _NO_BACKEND
        on_gpus = any(place.device == "cuda" for one in recording.processes for place in one.sums)
        machine = fingerprint() if on_gpus else None
        nccl = nccl_here() if on_gpus and "nccl" in backend else ()
        assert self._first is not None
        has_room = free_memory() > self._first.memory
        faults = has_room * self._first.in_page_faults
        environment = as_nccl_sees(os.environ) if nccl else os.environ
        around = NodeAndJob(
            node=probe() if nccl else None,
            nodes=self.hosts.nodes,
            environment=environment,
            nccl=nccl,
            tuner=nccl_tuner(environment) if nccl else "",
            interfaces=self.interfaces if "gloo" in backend else "",
            in_page_faults=faults,
        )
        settings = tuple(map(Configuration, _settings(recording, started, around, on_gpus)))
        return JobFacts(
            world_size=sum(of_each),
            nodes=self.hosts.nodes,
            backend=backend or _NO_BACKEND,
            devices=(machine.devices if machine is not None else ()) or ("cpu",),
            torch=torch_version(),
            gradient_bytes=0,
            parameters_digest=NO_MODEL,
            ddp_arguments={},
            knobs=tuple(name for name in BY_NAME if any(name in setting for setting in settings)),
            links=(machine.links,) if machine is not None and machine.links else (),
            nccl=".".join(map(str, nccl)),
            start_settings=settings,
            cores=usable_cpus(),
            ranks_per_host=started,
            own_ranks=started == 1 and any(not one.is_launched for one in recording.processes),
            ranks_of_nodes=where_uneven(of_each),
        )


@contextlib.contextmanager
def _heard() -> Iterator[None]:
    """TuningOver in the body in place of what is raised where the other hosts do not answer."""
    try:
        yield
    except HostsGone as gone:
        raise TuningOver(str(gone)) from None
    except (RuntimeError, TimeoutError) as error:
        raise TuningOver(f"the other hosts do not answer: {first_line(error)}") from None


def _settings(recording: Recording, started: int, around: NodeAndJob, on_gpus: bool) -> list[Setting]:
    """Settings that are worth a start, the most promising first; none that the user has set.

    Nor those under which some machines lose data: here no benchmark checks sums. `started`: ranks that were launched on
    this host.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    nodes, launched = usable_nodes(allowed), all(one.is_launched for one in recording.processes)
    is_bound = any(name in around.environment for name in BINDS_THREADS)
    # A rank that the script has started by itself is not known to be one when it begins.
    binds = len(nodes) > 1 and (on_gpus or started >= len(nodes)) and launched and not is_bound
    binding = [NUMA_BINDING.setting("node")] if binds else []
    threads: list[Setting] = []
    if THREADS.variable not in around.environment:
        cpus, ranks = usable_cpus(), max(len(recording.processes), started)
        now = max((one.threads for one in recording.processes), default=1 if started > 1 else cpus)
        threads = [THREADS.setting(count) for count in thread_counts(cpus, ranks, now)]
    return [*binding, *threads, *(setting for setting in start_settings(around) if not may_lose_data(setting))]
