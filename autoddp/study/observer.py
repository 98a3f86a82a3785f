"""Whoever wants to watch a study: the terminal, a file, a test."""

from __future__ import annotations

from collections.abc import Sequence

from autoddp.knobs import Rung
from autoddp.study.outcome import Outcome, Screened, TrialRecord
from autoddp.timing import Headroom
from autoddp.wire import JobFacts


class Observer:
    """Does nothing; whoever wants to watch overrides some of it.

    Called from the study's thread, between measurements, so drawing disturbs no timing.
    """

    def ready(self, facts: JobFacts) -> None:
        """The job runs and its DDP models are known."""

    def baseline(self, record: TrialRecord, headroom: Headroom) -> None:
        """The baseline and the headroom are measured."""

    def trial(self, record: TrialRecord, planned: int, best: TrialRecord | None, seconds_left: float) -> None:
        """A trial has ended; `planned` is how many there are in all, `best` the fastest so far."""

    def screened(self, settings: Sequence[Screened], trials: int) -> None:
        """The communication benchmark has judged the settings of another start; a promising one gets `trials`."""

    def semifinal(self, rung: Rung, contenders: int) -> None:
        """So many of a rung are about to run against each other, before the finals."""

    def final(self, number: int, planned: int) -> None:
        """Final round `number` of `planned` has ended."""

    def finished(self, outcome: Outcome) -> None:
        """The study is over."""
