"""When an attempt must be stopped: tuning is over, enough was seen, the ranks hang, or they write too much."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from autoddp.attempts.communication import Enough
from autoddp.attempts.isolating import Isolation
from autoddp.attempts.job.live_job import LiveJob
from autoddp.attempts.job.machine import NO_DDP
from autoddp.attempts.keeper import ProcessEnded
from autoddp.attempts.rank_states import Waiting
from autoddp.hosts.together import Hosts
from autoddp.processes.children import ENDED_WELL
from autoddp.units import data_size, duration

_LAST_SECONDS = 10.0  # of a diagnosis, in which what was recorded so far is looked at
_IN_VAIN = 20.0  # seconds in which ranks without DDP have only waited for each other: then they hang
_LOOKS = 1.0  # seconds between two looks at how much the script has written
_EFFORT = 20  # a look may take one part in so many of the time: many files take long to count


@dataclass
class Written:
    """How much the script has written in an attempt."""

    isolation: Isolation
    activity: str
    """See `Options.activity`."""
    _look_after: float = 0.0

    def too_much(self) -> str:
        """Why the attempt has to end; "" as long as it need not. Asked repeatedly, it looks now and then."""
        limit = self.isolation.limit
        if not limit:
            return ""
        if time.monotonic() - self._look_after < _LOOKS:
            return self.isolation.fills_the_disk()  # which costs next to nothing, and a copy may be fast
        began = time.monotonic()
        written = self.isolation.written()
        self._look_after = time.monotonic() + _EFFORT * (time.monotonic() - began)
        if written <= limit:
            return self.isolation.fills_the_disk()
        more = f"more than --scratch-limit ({data_size(limit)})"
        return f"the script has written {data_size(written)} during {self.activity}, {more}"


@dataclass
class Limits:
    """Whether an attempt must be stopped: it is of no use any more, or it writes too much."""

    job: LiveJob
    written: Written
    hosts: Hosts
    number: int
    """The attempt's number."""
    waiting: Waiting
    keeper: int
    """The keeper's process id."""
    activity: str
    """See `Options.activity`."""
    say: Callable[[str], None]
    """Shows the user a line."""
    recording: Callable[[], None]
    """See `Observer`."""
    enough: Enough | None = None
    """Whether enough is recorded of a script without DDP; None where nothing is recorded."""
    ended_at: float = 0.0
    """When the attempt was stopped or its first rank failed, by `time.perf_counter()`; 0 if neither has happened."""

    def in_words(self) -> str:
        """What is being waited for, and for how long at most."""
        machine = self.job.machine
        if self.enough is not None and machine.is_starting and (recording := self.enough.in_words):
            stands = self.enough.where
            return f"{recording}{f': {stands}' if stands else ''}{self._at_most}"
        where = "" if machine.over else self.waiting.where(machine.ended)
        return f"{machine.in_words}{f': {where}' if where else ''}{self._at_most}"

    @property
    def _at_most(self) -> str:
        machine = self.job.machine
        if machine.over or machine.at_most is None:  # when it is over, it is only left to end the ranks
            return ""
        return f"; {self.activity} ends in at most {duration(max(1.0, machine.at_most))}"

    def exceeded(self) -> bool:
        """Asked every half second."""
        must = self._must_stop()
        if must:
            self._ends_now()
        return must

    def rank_ended(self, end: ProcessEnded) -> None:
        """A rank's process has ended. Others may be left for half a minute after the first one has failed."""
        if end.how != ENDED_WELL:
            self._ends_now()
        self.job.rank_ended(end.pid, end.how)

    def _ends_now(self) -> None:
        self.ended_at = self.ended_at or time.perf_counter()

    def _must_stop(self) -> bool:
        if self.job.machine.attempt_must_end:
            return True
        if self.hosts.why_over:
            self.job.give_up(self.hosts.why_over)
            return True
        elsewhere = self.hosts.ended_elsewhere(self.number)
        if elsewhere:
            self.job.ended_elsewhere(elsewhere)
            return True
        machine = self.job.machine
        if not machine.over and (why := self.written.too_much()):
            self.job.give_up(why)
        self.hosts.waits(self.waiting.waited(machine.ended))
        if machine.measuring and (line := self.waiting.for_whom(self.hosts.at_work, self.hosts.unheard)):
            self.say(f"{line}{self._at_most}")
        if machine.is_starting and self.enough is None and (line := self.waiting.own_ranks()):
            self.say(line)
        if machine.is_starting and self._is_enough():
            self.job.give_up(NO_DDP)
            return True
        useless = self.waiting.unmoved() if machine.is_starting or machine.follows else ""
        if machine.is_starting and not machine.built_ddp:
            useless = useless or self.waiting.bare(self.keeper)
        if machine.is_starting and machine.at_most is None:  # without a budget no clock runs before the first step
            useless = useless or self.waiting.no_step()
        if useless:
            self.job.give_up(useless)
        return bool(useless)

    def _is_enough(self) -> bool:
        """Whether enough is recorded of a script without DDP, here or on another host."""
        if self.enough is None or self.job.machine.built_ddp:
            return False
        left = self.job.machine.at_most
        is_late = left is not None and left < _LAST_SECONDS and self.enough.has_steps
        is_over = self.enough()
        if self.enough.in_words:
            self.recording()
        if is_over or is_late or self._waits_in_vain:
            self.hosts.count_me(self._enough)  # before the ranks end here: those of other hosts fail for want of them
            return True
        return self.is_enough_elsewhere

    @property
    def _waits_in_vain(self) -> bool:
        """Whether the ranks hang. Not said of several hosts: over a slow link a large tensor may be on its way."""
        has_begun = self.enough is not None and bool(self.enough.in_words)
        return has_begun and not self.hosts.several and self.waiting.in_vain() >= _IN_VAIN

    @property
    def is_enough_elsewhere(self) -> bool:
        """Whether another host has recorded enough of a script without DDP, and ends its ranks."""
        is_asked = self.enough is not None and self.hosts.several and not self.job.machine.built_ddp
        return is_asked and bool(self.hosts.counted(self._enough))

    @property
    def _enough(self) -> str:
        """The key under which hosts are counted that have recorded enough."""
        return f"attempt{self.number}/enough"
