"""The study of a script without DDP: each measurement is a start of the script, and gives one number.

    StartStudy(measure, left, settings, observer).run(describe)

Only settings that are read when a process starts are tried. One after another goes on top of the best so far, and the
best of all runs against the script as written in final rounds. Numbers differ from one start to the next, so a round
is a pair of starts, in random order. By the same rule as for DDP jobs the rounds end, and something is launched.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.settings import StudySettings
from autoddp.study.decision import decide
from autoddp.study.finals import Rounds, ladder_of
from autoddp.study.measure import TrialFailed, TuningOver
from autoddp.study.observer import Observer
from autoddp.study.outcome import WORTHWHILE, Decision, Outcome, Standing, TrialRecord
from autoddp.study.reserve import FEWEST_ROUNDS
from autoddp.timing import LOOKS, Block, median
from autoddp.units import duration, percent, ratio
from autoddp.wire import JobFacts

_TIMES = 3  # starts as written that may fail in one round, although the first one did not
_PAIR = 2  # starts

MeasureStart = Callable[[Configuration], float]
"""Starts the script with a configuration; what its number costs, see `Objective`. Raises TrialFailed or TuningOver."""


@dataclass
class _Clock:
    """Measures starts, and knows how long they take."""

    measure: MeasureStart
    left: Callable[[], float]
    """Seconds that tuning may still take."""
    clock: Callable[[], float]
    took: list[float] = field(default_factory=list)

    def block(self, configuration: Configuration) -> Block:
        """What one start has given."""
        began = self.clock()
        try:
            return Block((self.measure(configuration),))
        finally:
            self.took.append(self.clock() - began)

    def affords(self, starts: int) -> bool:
        """Whether there is time for so many more starts."""
        return self.left() > starts * self.each

    @property
    def each(self) -> float:
        """Seconds of a usual start."""
        return median(self.took) if self.took else 0.0


class StartFinals(Rounds):
    """Final rounds in which each contender, and the script as written, is started anew."""

    def __init__(self, clock: _Clock, asked: StudySettings, observer: Observer) -> None:
        super().__init__(asked, observer, {})
        self._clock = clock
        self._random = random.Random(asked.seed)

    def _that_fit(
        self, finalists: Sequence[Configuration], expected: Mapping[Configuration, float]
    ) -> list[Configuration]:
        return list(finalists)

    def _affords(self, running: Sequence[Configuration], expected: Mapping[Configuration, float]) -> bool:
        return self._clock.affords(len(running))

    def _round(
        self,
        running: list[Configuration],
        blocks: dict[Configuration, list[Block]],
        expected: Mapping[Configuration, float],
    ) -> bool:
        found: dict[Configuration, Block] = {}
        for configuration in self._random.sample(running, len(running)):
            for _ in range(_TIMES if configuration == AS_WRITTEN else 1):
                try:
                    found[configuration] = self._clock.block(configuration)
                    break
                except TrialFailed:
                    self._fails(configuration, running, blocks)
        if AS_WRITTEN not in found:
            return False
        for configuration, block in found.items():
            blocks[configuration].append(block)
        return True


class StartStudy:
    """One study; `run` does it. `left`: seconds that tuning may still take.

    `describe`: the job's facts, once the script as written was measured; their `start_settings` are tried in order.
    `clock`: seconds, which also pass for a start that need not be made again.
    """

    def __init__(
        self,
        measure: MeasureStart,
        left: Callable[[], float],
        asked: StudySettings,
        observer: Observer,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = _Clock(measure, left, clock)
        self._asked = asked
        self._observer = observer
        self._finals = StartFinals(self._clock, asked, observer)
        self._records: list[TrialRecord] = []

    def run(self, describe: Callable[[], JobFacts]) -> Outcome:
        """Everything, from the script as written to the decision.

        TrialFailed or TuningOver where not even the script as written could be measured.
        """
        began = time.perf_counter()
        baseline = TrialRecord(0, AS_WRITTEN, "measured", (self._clock.block(AS_WRITTEN),))
        facts = describe()
        self._observer.started(baseline, facts, self._clock.each)
        ended = ""
        try:
            best = self._tried(facts.start_settings, baseline)
            if best.configuration != AS_WRITTEN:
                expected = {one.configuration: one.seconds for one in (baseline, best)}
                self._finals.run([best.configuration], expected)
        except TuningOver as over:
            ended = str(over)
        outcome = self._outcome(facts, baseline, ended)
        outcome.wall_seconds["starts"] = time.perf_counter() - began
        self._observer.finished(outcome)
        return outcome

    def _tried(self, settings: Sequence[Configuration], baseline: TrialRecord) -> TrialRecord:
        """Try the settings; the best configuration of those that gain, or the baseline."""
        best, planned = baseline, min(len(settings), self._asked.trials)
        for number, setting in enumerate(settings[:planned], 1):
            if not self._clock.affords(1 + _PAIR * FEWEST_ROUNDS):
                break
            record = self._trial(number, best.configuration.with_values(**setting))
            self._records.append(record)
            if record.seconds < best.seconds * (1 - WORTHWHILE):
                best = record
            self._observer.trial(record, planned, best, self._clock.left())
        return best

    def _trial(self, number: int, configuration: Configuration) -> TrialRecord:
        try:
            return TrialRecord(number, configuration, "measured", (self._clock.block(configuration),))
        except TrialFailed as failed:
            return TrialRecord(number, configuration, "failed", reason=str(failed))

    def _outcome(self, facts: JobFacts, baseline: TrialRecord, ended: str) -> Outcome:
        paired = self._finals.paired
        ladder = ladder_of(paired.finalists)
        return Outcome(
            facts=facts,
            baseline=baseline,
            headroom=0.0,
            headroom_block=Block(()),
            trials=tuple(self._records),
            baseline_rounds=paired.rounds,
            finalists=paired.finalists,
            ladder=ladder,
            decision=self._decided(facts, baseline, ladder, ended),
            objective=self._asked.objective,
            ended=ended,
        )

    def _decided(self, facts: JobFacts, baseline: TrialRecord, ladder: Sequence[Standing], ended: str) -> Decision:
        stays = "your settings stay"
        missing = min(len(facts.start_settings), self._asked.trials) - len(self._records)
        if ladder:
            decision = decide(ladder, self._asked, None)
            is_open = decision.configuration == AS_WRITTEN and not self._finals.paired.is_settled
            if not is_open:
                return decision
            gain = f"{ladder[0].configuration} gives {ladder[0].speedup} in {len(ladder[0].rounds)} final rounds"
            if len(ladder[0].rounds) >= self._finals.most:
                return replace(decision, why=f"undecided: {gain}, which differ too much: {stays}")
            why = f"undecided: {gain}, too few to be sure: {stays}{self._more(ended, missing)}"
            return Decision(AS_WRITTEN, why, is_open=True)
        if not facts.start_settings:
            return Decision(AS_WRITTEN, f"no setting that is read at the start has a reason to help here: {stays}")
        usable = [record for record in self._records if record.usable]
        best = min(usable, key=lambda record: record.seconds, default=None)
        if best is not None and best.seconds < baseline.seconds * (1 - WORTHWHILE):
            if best.configuration in self._finals.failed:
                return Decision(AS_WRITTEN, f"{best.configuration} gained in its trial, and failed later: {stays}")
            gain = f"in its trial {best.configuration} was ×{ratio(baseline.seconds / best.seconds)}"
            why = f"undecided: {gain}, which final rounds must prove: {stays}{self._more(ended, missing)}"
            return Decision(AS_WRITTEN, why, is_open=True)
        if missing > 0 and self._asked.trials:
            many = f"{missing} of {missing + len(self._records)} settings were not tried"
            return Decision(AS_WRITTEN, f"undecided: {many}: {stays}{self._more(ended, missing)}", is_open=True)
        if self._records and not usable:
            tried = "the one setting" if len(self._records) == 1 else f"each of the {len(self._records)} settings"
            return Decision(AS_WRITTEN, f"the script failed with {tried} that was tried: {stays}")
        tried = "the one setting that was tried" if len(self._records) == 1 else f"any of {len(self._records)} settings"
        return Decision(AS_WRITTEN, f"no gain of {percent(WORTHWHILE)} by {tried}: {stays}")

    def _more(self, ended: str, missing: int) -> str:
        """A clause that tells what tuning lacked. `missing`: settings that were not tried."""
        if ended and "--budget" not in ended:
            return f" ({ended})"
        starts = len(self._clock.took) + missing + _PAIR * LOOKS[-1]
        each = self._clock.each
        takes = f"a start takes {duration(each)}"
        return f"; {takes}, and --budget {math.ceil(starts * each / 60)}m would decide it"
