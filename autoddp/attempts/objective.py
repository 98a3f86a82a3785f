"""Tuning for an objective: each measurement of a script without DDP is one start of it, in an attempt of its own.

The starts are isolated as all attempts are. There is no live job and no state machine, because no order is given to a
running script: the launcher reads what the ranks print, or what is recorded of their steps, and ends the start when it
has seen as much as in the first one. The study runs in the main thread, where attempts are made.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from autoddp.attempts.deadline import Deadline
from autoddp.attempts.job_machine import Closed, Said, StopAsked, Worker
from autoddp.attempts.live_job import WorkerServer
from autoddp.attempts.progress import FirstStart, PrintedNumbers, Progress, StepsMade, Unusable, is_reached
from autoddp.attempts.tune import Tuned, Tuning, Written
from autoddp.commandline.local_fingerprint import nccl_here
from autoddp.commandline.mode import torch_version
from autoddp.diagnose.collectives import recorded
from autoddp.diagnose.collectives.recording import Recording
from autoddp.errors import AutoddpError, UsageError
from autoddp.isolation import Level
from autoddp.isolation.trackers import why_not
from autoddp.knobs import AS_WRITTEN, BY_NAME, Configuration
from autoddp.knobs.base import Setting
from autoddp.knobs.computing import THREADS, thread_counts
from autoddp.knobs.env import NodeAndJob, start_settings
from autoddp.log import get_logger, printable
from autoddp.processes.silence import awaiting
from autoddp.runs.folder import CALLS
from autoddp.runs.rank_logs import LogKeeper
from autoddp.settings import Objective
from autoddp.study import StartStudy, TrialFailed, TuningOver
from autoddp.topology import fingerprint, free_memory
from autoddp.topology.nccl.tuner import nccl_tuner
from autoddp.topology.probe import probe
from autoddp.torchrun.options import processes_per_node
from autoddp.units import duration
from autoddp.wire import Goodbye, Hello, JobFacts, Message, StopTuning, Welcome
from autoddp.worker.observe.kernel_accounts import PageFaultCount, peak_memory

logger = get_logger(__name__)

NO_MODEL = "no DDP model"
"""What stands in place of the digest of a model's parameters: a job that builds one is another job."""
_FIRST_NUMBER = 300.0  # seconds that the first start has for its first number, where no --budget is given
_SHARE_OF_A_START = 8  # the first start takes one part in so many of the time, where it is not known how long it is
_TIMES = 5  # as long as the first start: that one filled the caches, so a start that works is no slower
_LEAST_PATIENCE = 60.0  # seconds that any later start has
_GOES_ON = 1.0  # seconds after a rank's first word in which it says that it ends, or it trains a DDP model
_NO_BACKEND = "none"


@dataclass
class _Start:
    """One start of the script, watched to its end. `is_over` is asked every half second, in the main thread."""

    objective: Objective
    progress: Progress
    needed: Mapping[int, int] | None
    """What it has to show; None in the first start, which finds out."""
    deadline: Deadline
    written: Written
    patience: float
    """Seconds that a later start has."""
    folder: Path
    """The attempt's."""
    words: str
    """What is measured."""
    ended_by_us: bool = False
    builds_ddp: bool = False
    stopped: StopTuning | None = None
    """What the script must not do while it is tuned, if it was about to do that."""
    tuning_over: str = ""
    failed: str = ""
    """Why the start is of no use."""
    failures: list[tuple[float, str]] = field(default_factory=list)
    """What ranks say of their ends, and when they ended."""
    in_page_faults: float = 0.0
    """Share of the measured time that page faults took at most on a rank."""
    seconds: float = 0.0
    """For which it ran."""
    memory: int = 0
    """Bytes that its ranks have had together at most."""
    _spoke_at: float | None = None
    _faults: dict[int, PageFaultCount] = field(default_factory=dict)
    _faults_since: float = 0.0

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._so_far = f"no {self.progress.what} yet"
        longest = (self.deadline.left or _FIRST_NUMBER) / _SHARE_OF_A_START
        self._first = FirstStart(self.progress, longest) if self.needed is None else None

    def heard(self, event: Said | Closed | StopAsked) -> None:
        """Called by the threads of the socket."""
        if isinstance(event, StopAsked):
            self.stopped = self.stopped or event.message
        elif isinstance(event, Said):
            self._said(event.worker, event.message)

    def _said(self, worker: Worker, message: object) -> None:
        """A rank connects when it has built a DDP model, or to say with which exception it ends."""
        match message:
            case Hello():
                self._spoke_at = time.monotonic()
                with contextlib.suppress(OSError):  # gone already
                    worker.send(Welcome(True))
            case Goodbye(built_ddp=False):
                self._spoke_at = None
                self.failures.append((message.at, f"rank {message.rank}: {message.reason}"))
            case Message():
                self.builds_ddp = True

    def in_words(self) -> str:
        """What is being waited for. Called by another thread."""
        return f"the script runs {self.words}: {self._so_far}, {duration(time.monotonic() - self._began)}"

    def is_over(self) -> bool:
        """Whether the start has to be ended, because enough was seen or for another reason."""
        self.ended_by_us = self.ended_by_us or self._must_end()
        return self.ended_by_us

    def _must_end(self) -> bool:
        now = time.monotonic()
        if self._spoke_at is not None and now - self._spoke_at > _GOES_ON:
            self.builds_ddp = True
        if self.builds_ddp or self.stopped is not None:
            return True
        self.tuning_over = self.written.too_much() or self._why_too_late(now - self._began)
        if self.tuning_over or self.failed:
            return True
        try:
            self.progress.look()
            if counts := self.progress.counts:
                self._so_far = f"{min(counts.values())} {self.progress.what} so far"
            return self._has_shown_enough()
        except Unusable as why:
            self.failed = str(why)
            return True

    def _has_shown_enough(self) -> bool:
        if self._first is None:
            assert self.needed is not None
            return is_reached(self.needed, self.progress.counts)
        over = self._first.is_over()
        if self._first.has_begun:
            self.deadline.stepped()
            self._watch_memory()
        return over

    def _why_too_late(self, passed: float) -> str:
        """Why tuning has to end for want of time; a later start that takes too long has merely failed."""
        if self._first is not None and not self._first.has_begun:
            late = self.deadline.why_over or (passed > _FIRST_NUMBER and self.deadline.left is None)
            return f"{self._nothing} within {duration(passed)}; --budget allows more" if late else ""
        if self._first is None and passed > self.patience:
            self.failed = f"after {duration(passed)} it has not come as far as the script as written"
        return self.deadline.why_over

    @property
    def _nothing(self) -> str:
        if self.objective.of_steps:
            return "no step of an optimizer, and no collectives that repeat, were seen"
        return f"the script has printed nothing that {self.objective.text} finds"

    def _watch_memory(self) -> None:
        """How much of the time the ranks that call torch.distributed are in page faults, since the first number."""
        pids = {int(path.name.partition("-")[0]) for path in (self.folder / CALLS).glob("*.calls")}
        if not self._faults:
            self._faults, self._faults_since = {pid: PageFaultCount(pid) for pid in pids}, time.monotonic()
            return
        took = max((count.taken().seconds for count in self._faults.values()), default=0.0)
        self.in_page_faults = took / max(time.monotonic() - self._faults_since, 1e-3)
        self.memory = max(self.memory, sum(map(peak_memory, pids)))

    def cost(self, failure: str) -> float:
        """What the start amounts to, once it has ended. `failure`: why the attempt has failed; "" if it has not.

        TrialFailed, or TuningOver.
        """
        if self.tuning_over:
            raise TuningOver(self.tuning_over)
        if not self.ended_by_us and (why := failure and min(self.failures, default=(0.0, failure))[1]):
            raise TrialFailed(why)
        if self.failed:
            raise TrialFailed(self.failed)
        try:
            if not self.ended_by_us:  # it has ended by itself, and well
                self.progress.look()
                self.progress.ends()
                self.deadline.stepped()
            return self.progress.cost(self.shown)
        except Unusable as why:
            raise TrialFailed(str(why)) from None

    @cached_property
    def shown(self) -> Mapping[int, int]:
        """What each start has to show."""
        if self._first is None:
            assert self.needed is not None
            return self.needed
        return self._first.needed if self._first.has_begun else self.progress.counts


class ObjectiveTuning(Tuning):
    """The tuning of a script without DDP on one host; `run()` does it."""

    def run(self) -> Tuned:
        """Run the study, a start of the script for each measurement.

        Never raises for anything the script does but for one thing: UsageError where it builds a DDP model.
        """
        tuned = Tuned(why=why_not(os.environ))
        if tuned.why:
            return tuned
        began = time.perf_counter()
        self._until = Deadline(self.options.budget, self.began, by_length=False)
        self._number = 0
        self._first: _Start | None = None
        self.reporter.say(self._isolation.says(self.options.activity))
        try:
            study = StartStudy(self._start, self._left, self.options.study, self.reporter.observer)
            tuned.outcome = study.run(self._facts)
            tuned.recipe = self.reporter.recipe(tuned.outcome, ())
        except (TrialFailed, TuningOver) as over:
            tuned.why = str(over)
        except OSError as error:
            place = printable(error.filename or str(self._folder.path))
            tuned.why = f"{place} cannot be written ({error.strerror or error}); --output names another place"
        except AutoddpError:
            raise
        except Exception as error:
            logger.exception("the study failed")
            tuned.why = f"the study itself failed: {error!r}"
        tuned.wall_seconds["total"] = time.perf_counter() - began
        return tuned

    @property
    def _objective(self) -> Objective:
        assert self.options.study.objective is not None
        return self.options.study.objective

    @property
    def _records(self) -> bool:
        return True

    def _left(self) -> float:
        left = self._until.left
        return math.inf if left is None else left

    def _start(self, configuration: Configuration) -> float:
        """What one start with the configuration amounts to. TrialFailed, or TuningOver."""
        if self._first is not None and self._until.why_over:
            raise TuningOver(self._until.why_over)
        while True:
            start, failure = self._made(configuration)
            if start.builds_ddp:
                raise UsageError(
                    f"--objective {self._objective.text}: {self.options.script} builds a DistributedDataParallel "
                    "model, whose settings are tuned without this option: leave it out"
                )
            if start.stopped is None:
                break
            if not start.stopped.overlay_is_to_blame or self.options.isolation is Level.OVERLAY:
                raise TuningOver(start.stopped.reason)
            self._isolate(Level.GUARD, f"the script failed under it: {start.stopped.reason}")
            self.reporter.say(f"another attempt; {self._isolation.says(self.options.activity)}")
        cost = start.cost(failure)
        self._first = self._first or start
        return cost

    def _made(self, configuration: Configuration) -> tuple[_Start, str]:
        """Make one attempt, to its end; what was seen of it, and why it has failed, "" if it has not."""
        number, self._number = self._number, self._number + 1
        place = self._place = self._folder.attempt(number)
        written = self._where_writes_go(number, place)
        start = self._watched(place, configuration)
        attempt = self._attempt_with(number, place, written, configuration.variables)
        began, server = time.monotonic(), WorkerServer(self._folder.socket, number, start.heard)
        try:
            with LogKeeper(place), awaiting(start.in_words):
                failure = self._keeper.run(attempt, lambda _: None, start.is_over)
        finally:
            server.close()
        start.seconds = time.monotonic() - began
        return start, failure

    def _watched(self, place: Path, configuration: Configuration) -> _Start:
        first = self._first
        period = first.progress.period if first is not None and isinstance(first.progress, StepsMade) else None
        return _Start(
            objective=self._objective,
            progress=StepsMade(place, period) if self._objective.of_steps else PrintedNumbers(self._objective, place),
            needed=first.shown if first is not None else None,
            deadline=self._until,
            written=Written(self._isolation, self.options.activity),
            patience=max(_LEAST_PATIENCE, _TIMES * first.seconds) if first is not None else math.inf,
            folder=place,
            words="as written" if configuration == AS_WRITTEN else f"with {configuration}",
        )

    def _facts(self) -> JobFacts:
        """What is known of the job after the first start, and the settings that it gives a reason for."""
        recording = recorded(self._place / CALLS)
        started = processes_per_node(self._torchrun)
        backends = Counter(group.backend for group in recording.groups)
        backend = backends.most_common(1)[0][0] if backends else _NO_BACKEND
        on_gpus = any(place.device == "cuda" for one in recording.processes for place in one.sums)
        machine = fingerprint() if on_gpus else None
        nccl = nccl_here() if on_gpus and "nccl" in backend else ()
        assert self._first is not None
        has_room = free_memory() > self._first.memory
        faults = has_room * self._first.in_page_faults
        settings = tuple(map(Configuration, _settings(recording, started, nccl, faults, os.environ)))
        return JobFacts(
            world_size=started,
            nodes=1,
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
            cores=len(os.sched_getaffinity(0)),
            ranks_per_host=started,
            own_ranks=started == 1 and any(not one.is_launched for one in recording.processes),
        )


def _settings(
    recording: Recording, started: int, nccl: tuple[int, ...], in_page_faults: float, environment: Mapping[str, str]
) -> list[Setting]:
    """Settings that are worth a start, the most promising first; none that the user has set.

    `started`: ranks that were launched; `nccl`: its version, if the script uses it.
    """
    threads: list[Setting] = []
    if THREADS.variable not in environment:
        cpus, ranks = len(os.sched_getaffinity(0)), max(len(recording.processes), started)
        now = max((one.threads for one in recording.processes), default=1 if started > 1 else cpus)
        threads = [THREADS.setting(count) for count in thread_counts(cpus, ranks, now)]
    around = NodeAndJob(
        node=probe() if nccl else None,
        nodes=1,
        environment=environment,
        nccl=nccl,
        tuner=nccl_tuner(environment) if nccl else "",
        in_page_faults=in_page_faults,
    )
    return [*threads, *start_settings(around)]
