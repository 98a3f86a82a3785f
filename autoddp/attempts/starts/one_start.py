"""One start of a script without DDP, watched by the launcher of each host until it has shown enough on all of them.

start = OneStart(objective, progress, needed=None, …)
while not start.is_over(): …                   # asked every half second, while the ranks run
cost = cost_of_all(hosts.exchange(key, start.seen(failure), Seen, say))
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from autoddp.attempts.job.deadline import Deadline
from autoddp.attempts.job.events import Closed, Said, StopAsked, Worker
from autoddp.attempts.limits import Written
from autoddp.attempts.starts.progress import FirstStart, Progress, StepsMade, Unusable, is_reached
from autoddp.attempts.starts.start_journal import ShownByHost
from autoddp.hosts.together import Hosts
from autoddp.runs.folder import CALLS
from autoddp.settings import Objective
from autoddp.study import TrialFailed, TuningOver
from autoddp.units import duration
from autoddp.wire import Goodbye, Hello, StopTuning, Welcome
from autoddp.worker.observe.kernel_accounts import PageFaultCount, peak_memory

_FIRST_NUMBER = 300.0  # seconds that the first start has for its first number, where no --budget is given
_SHARE_OF_A_START = 8  # the first start takes one part in so many of the time, where it is not known how long it is
_LEAST_SHARE = 0.5  # of what the first start has shown: a script that trains for a fixed time may show fewer in another
_LATER = 3.0  # seconds that a host may be behind another one in what it shows
_LOOKS = 0.25  # seconds between two looks whether the other hosts' parts are over


@dataclass(frozen=True)
class Seen:
    """What one host has seen of a start. The hosts tell each other, so all do the same afterwards."""

    cost: float | None = None
    """What the start amounts to; None where it failed, or where no rank of this host shows anything."""
    failed: str = ""
    """Why the start is of no use."""
    failed_at: float = 0.0
    """When, by the first host's wall clock; 0 where this host's part ended only because another host's had."""
    nothing: str = ""
    """What no rank of this host shows."""
    tuning_over: str = ""
    builds_ddp: bool = False
    stopped: str = ""
    """What the script must not do while it is tuned, if it was about to do that."""
    overlay_is_to_blame: bool = False
    shown: ShownByHost = field(default_factory=ShownByHost)
    """What the cost comes from."""

    @property
    def is_useless(self) -> bool:
        """Whether the start cannot be counted, because of what this host has seen."""
        return bool(self.failed or self.tuning_over or self.builds_ddp or self.stopped)


def cost_of_all(seen: Sequence[Seen]) -> float:
    """What a start amounts to, by what each host has seen: of all ranks the highest cost counts.

    TrialFailed, or TuningOver. A part that fails makes the others fail, so the first failure is the one that is told.
    """
    if over := next((one.tuning_over for one in seen if one.tuning_over), ""):
        raise TuningOver(over)
    if failures := [(one.failed_at or math.inf, one.failed) for one in seen if one.failed]:
        raise TrialFailed(min(failures)[1])
    costs = [one.cost for one in seen if one.cost is not None]
    if not costs:
        raise TrialFailed(seen[0].nothing)
    return max(costs)


@dataclass
class OneStart:
    """This host's part of a start. `is_over` is asked every half second, in the main thread."""

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
    hosts: Hosts
    number: int
    """The attempt's."""
    as_before: Mapping[int, int] = field(default_factory=dict)
    """See `FirstStart`."""
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
    _is_counted: bool = False
    """Whether this host is counted among those that have seen enough, or whose part has ended well."""
    _is_silent: bool = False
    """Whether the ranks of this host had shown nothing until the other hosts had seen enough."""
    _ended_elsewhere: str | None = None
    """Why the start has ended on another host, if it had before it ended here."""
    _others_enough_at: float = 0.0
    _faults: dict[int, PageFaultCount] = field(default_factory=dict)
    _faults_since: float = 0.0
    _counts: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._so_far = f"no {self.progress.what} yet"
        longest = (self.deadline.left or _FIRST_NUMBER) / _SHARE_OF_A_START
        self._first = FirstStart(self.progress, longest, self.as_before) if self.needed is None else None

    def heard(self, event: Said | Closed | StopAsked) -> None:
        """Called by the threads of the socket."""
        if isinstance(event, StopAsked):
            self.stopped = self.stopped or event.message
        elif isinstance(event, Said):
            self._said(event.worker, event.message)

    def _said(self, worker: Worker, message: object) -> None:
        match message:
            case Hello():
                self.builds_ddp = self.builds_ddp or message.built_ddp
                with contextlib.suppress(OSError):  # gone already
                    worker.send(Welcome(True))
            case Goodbye():
                self.failures.append((message.at, f"rank {message.rank}: {message.reason}"))

    def in_words(self) -> str:
        """What is being waited for. Called by another thread."""
        return f"the script runs {self.words}: {self._so_far}, {duration(time.monotonic() - self._began)}"

    def is_over(self) -> bool:
        """Whether the start has to be ended, because enough was seen or for another reason."""
        self.ended_by_us = self.ended_by_us or self._must_end()
        return self.ended_by_us

    def _must_end(self) -> bool:
        now = time.monotonic()
        if self.builds_ddp or self.stopped is not None:
            return True
        self.tuning_over = self.hosts.why_over or self.written.too_much() or self._why_too_late(now - self._began)
        if self.tuning_over or self.failed:
            return True
        try:
            self.progress.look()
            if counts := self.progress.counts:
                self._so_far = f"{min(counts.values())} {self.progress.what} so far"
            if self._is_enough_everywhere(self._has_shown_enough()):
                return True
        except Unusable as why:
            self.failed = str(why)
            return True
        self._ended_elsewhere = self.hosts.ended_elsewhere(self.number)
        return self._ended_elsewhere is not None

    def _is_enough_everywhere(self, here: bool) -> bool:
        """Whether all hosts have seen enough. Where the ranks of a host show nothing, it is enough for the others."""
        if not self.hosts.several:
            return here
        if self.needed is None and not self.progress.counts and self.hosts.counted(self._enough):
            self._others_enough_at = self._others_enough_at or time.monotonic()
            self._is_silent = time.monotonic() - self._others_enough_at > _LATER
        if here or self._is_silent:
            self.is_enough()
        return self._is_counted and self.hosts.counted(self._enough) == self.hosts.nodes

    def is_enough(self) -> None:
        """Tell the other hosts, once, that this one has seen enough, or that its part has ended well."""
        if not self._is_counted:
            self._is_counted = True
            self.hosts.count_me(self._enough)

    def await_the_others(self) -> str:
        """Wait until all hosts have seen enough, or one's part is of no use; why tuning has to end meanwhile, or "".

        The ranks of this host may have ended by themselves long before those of another one do.
        """
        while self.hosts.several and self.hosts.counted(self._enough) < self.hosts.nodes:
            if self.hosts.ended_elsewhere(self.number) is not None:
                break
            if why := self.hosts.why_over or self._time_is_over:
                return why
            time.sleep(_LOOKS)
        return ""

    def _has_shown_enough(self) -> bool:
        if self._first is None:
            assert self.needed is not None
            return is_reached(self.needed, self.progress.counts)
        had_begun, over = self._first.has_begun, self._first.is_over()
        if self._first.has_begun and not had_begun:
            self.hosts.count_me(self._begun)
        if self._first.has_begun:
            self.deadline.stepped()
            self._watch_memory()
        return over

    def _why_too_late(self, passed: float) -> str:
        """Why tuning has to end for want of time; a later start that takes too long has merely failed."""
        if self._first is not None and not self._first.has_begun:
            late = self._time_is_over or (passed > _FIRST_NUMBER and self.deadline.left is None)
            if not late or (self.hosts.several and self.hosts.counted(self._begun)):
                return self._time_is_over
            return f"{self._nothing} within {duration(passed)}; --budget allows more"
        if self._first is None and passed > self.patience:
            self.failed = f"after {duration(passed)} it has not come as far as the script as written"
        return self._time_is_over

    @property
    def _time_is_over(self) -> str:
        """Why the time is over, on the host that leads: its clock counts. Another one may have waited long for it."""
        return self.deadline.why_over if self.hosts.rank == 0 else ""

    @property
    def _enough(self) -> str:
        """The key under which hosts are counted that have seen enough."""
        return f"attempt{self.number}/enough"

    @property
    def _begun(self) -> str:
        """The key under which hosts are counted that have seen a first number."""
        return f"attempt{self.number}/begun"

    @property
    def _nothing(self) -> str:
        if self.objective.of_steps:
            return "no step of an optimizer, and no collectives that repeat, were seen"
        return f"the script has printed nothing that {self.objective.text} finds"

    def _watch_memory(self) -> None:
        """How much of the time the ranks that call torch.distributed are in page faults, since the first number.

        What a script does behind its last number, such as saving, is no part of that time.
        """
        pids = {int(path.name.partition("-")[0]) for path in (self.folder / CALLS).glob("*.calls")}
        self.memory = max(self.memory, sum(map(peak_memory, pids)))
        before, self._counts = self._counts, dict(self.progress.counts)
        if not self._faults:
            self._faults, self._faults_since = {pid: PageFaultCount(pid) for pid in pids}, time.monotonic()
        elif self._counts != before:
            took = max((count.taken().seconds for count in self._faults.values()), default=0.0)
            self.in_page_faults = took / max(time.monotonic() - self._faults_since, 1e-3)

    def look_at_the_rest(self) -> None:
        """Take in what came since the last look, where the script has ended by itself."""
        if not self.ended_by_us:
            try:
                self.progress.look()
            except Unusable as why:
                self.failed = str(why)

    def seen(self, failure: str) -> Seen:
        """What this host has seen, once its part has ended. `failure`: why the attempt has failed; "" if it has not."""
        if self.stopped is not None:
            return Seen(stopped=self.stopped.reason, overlay_is_to_blame=self.stopped.overlay_is_to_blame)
        if self.builds_ddp:
            return Seen(builds_ddp=True)
        if self.tuning_over:
            return Seen(tuning_over=self.tuning_over)
        # Where all hosts have seen enough, one ends its ranks first, and the others' fail for want of them.
        if not (self.ended_by_us or self._is_counted) and failure:
            at, why = min(self.failures, default=(time.monotonic(), failure))
            return Seen(failed=why, failed_at=self._now - (time.monotonic() - at))
        if self._ended_elsewhere is not None and not self._is_counted:
            return Seen(failed=self._ended_elsewhere)
        try:
            return self._with_cost()
        except Unusable as why:
            return Seen(failed=str(why), failed_at=self._now)

    @property
    def _now(self) -> float:
        return time.time() - self.hosts.ahead

    def _with_cost(self) -> Seen:
        if self.failed:
            raise Unusable(self.failed)
        if not self.ended_by_us:  # it has ended by itself, and well
            try:
                self.progress.ends()
            except Unusable:
                if self.progress.counts or not self.hosts.several:
                    raise
            self._require_as_much()
        if not self.shown:
            return Seen(nothing=self._nothing)
        period = self.progress.period if isinstance(self.progress, StepsMade) else None
        return Seen(self.progress.cost(self.shown), shown=ShownByHost(tuple(sorted(self.shown.items())), period))

    def _require_as_much(self) -> None:
        """Unusable where the script has given up: its first numbers are no measure of what the others show later."""
        for rank, count in self.shown.items():
            shown = self.progress.counts.get(rank, 0)
            if shown < count * _LEAST_SHARE:
                of_it = f"{shown} of the {count} {self.progress.what} that rank {rank} shows as written"
                raise Unusable(f"the script has ended after {of_it}")

    @cached_property
    def shown(self) -> Mapping[int, int]:
        """What each start has to show."""
        if self._first is None:
            assert self.needed is not None
            return self.needed
        if self._is_silent:
            return {}
        return self._first.needed if self._first.has_begun else self.progress.counts
