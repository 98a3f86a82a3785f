"""The interface through which the terminal, a log file or a test follows a study."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoddp.knobs import Rung
from autoddp.study.outcome import Outcome, Screened, TrialRecord
from autoddp.timing import Headroom
from autoddp.wire import JobFacts


class Observer:
    """Receives the events of a study. The methods do nothing here; subclasses override those that they need.

    All methods but `recording` are called in the study's thread, between measurements, so drawing disturbs no timing.
    """

    def ready(self, facts: JobFacts) -> None:
        """The job is running, and its DDP models are known."""

    def recording(self) -> None:
        """The script makes collective calls of its own, which are timed. It is called often, also in another thread."""

    def baseline(self, record: TrialRecord, headroom: Headroom) -> None:
        """The baseline and the headroom have been measured."""

    def started(self, record: TrialRecord, facts: JobFacts, seconds: float) -> None:
        """A start of a script without DDP has been measured as written, which took so many `seconds`."""

    def diagnosed(self, diagnosis: Any) -> None:
        """It is known why the job is slow, as far as there was time to find out: a `diagnose.Diagnosis`."""

    def not_diagnosed(self, why: str) -> None:
        """The script has failed while that was to be found out."""

    def trial(self, record: TrialRecord, planned: int, best: TrialRecord | None, seconds_left: float) -> None:
        """A trial has ended. `planned` is the number of all trials, `best` is the fastest of them so far."""

    def enough(self, number: int, planned: int) -> None:
        """After `number` of `planned` trials nothing more is likely to come of another one."""

    def screened(self, settings: Sequence[Screened], trials: int) -> None:
        """The communication benchmark has judged the env settings; a promising one gets `trials` trials."""

    def no_time_for_starts(self, needed: float) -> None:
        """The promising env settings are not tried: that would take a budget of `needed` seconds, at least."""

    def semifinal(self, rung: Rung, contenders: int) -> None:
        """A semifinal of a rung is about to begin, between `contenders` configurations."""

    def final(self, number: int, planned: int) -> None:
        """Final round `number` has ended; there are `planned` at most."""

    def finished(self, outcome: Outcome) -> None:
        """The study is over."""
