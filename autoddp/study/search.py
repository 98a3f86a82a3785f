"""A study from headroom to decision. Deterministic for a seed and a sequence of measurements.

A launcher that takes over replays the journal through the same code, and goes on where the first one stopped.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

from autoddp.knobs import AS_WRITTEN, Configuration, Rung, Value
from autoddp.knobs.binding import NUMA_BINDING
from autoddp.knobs.threads import THREADS
from autoddp.study.decision import decide, ladder_of
from autoddp.study.ledger import Ledger
from autoddp.study.measure import Measure, TrialFailed, TuningOver
from autoddp.study.observer import Observer
from autoddp.study.outcome import Decision, Outcome, Standing, State, TrialRecord
from autoddp.study.pace import Pace
from autoddp.study.sampler import Sampler
from autoddp.study.space import Space
from autoddp.study.starts import RESERVED, Starts
from autoddp.timing import Block, median, speedup
from autoddp.units import MIB
from autoddp.wire import JobFacts

WORTHWHILE = 0.03
"""Headroom below which no trial is run: less can hardly be told from noise."""
_HOPELESS = 1.15  # times the rung's best, after the first block: measured no further
_HOPELESS_AT_FIRST = 1.5  # where the first block is short beside the second, and still warming up
_FINALISTS, _MOST_FINALISTS = 2, 4
_TIED = 1.08  # times the best: as far as the noise of a few short steps reaches
_SHARE_FOR_PROCESSORS = 4  # one trial of so many, at most, looks for the CPUs and threads of a rank


@dataclass(frozen=True)
class Plan:
    """What the user asked for."""

    trials: int = 20
    allow: Rung = Rung.NEAR
    budget: float = 300.0
    """Seconds of measuring after which no new trial begins."""
    seed: int = 0


class Study:
    """`Study(measure, facts, plan, observer).run()`."""

    def __init__(self, measure: Measure, facts: JobFacts, plan: Plan, observer: Observer) -> None:
        self._ledger = Ledger(measure)
        self._facts = facts
        self._plan = plan
        self._observer = observer
        self._random = random.Random(plan.seed)
        self._trials: list[TrialRecord] = []
        self._guilty: frozenset[tuple[str, Value]] = frozenset()

    def run(self) -> Outcome:
        """Measure and decide. TuningOver, or TrialFailed of the baseline itself, when there is nothing to decide on."""
        self._observer.ready(self._facts)
        baseline, headroom, off = self._headroom()
        self._observer.baseline(baseline, headroom)
        self._pace = Pace(baseline.seconds)
        rounds: list[Block] = []
        finalists: list[Standing] = []
        held = self._find_processors(baseline)
        if headroom >= WORTHWHILE:
            self._run_trials(held)
        if self._trials:
            rounds, finalists = self._finals(baseline)
        rounds, finalists = self._with_starts(baseline, rounds, finalists)
        ladder = ladder_of(finalists)
        outcome = Outcome(
            facts=self._facts,
            baseline=baseline,
            headroom=headroom,
            headroom_block=off,
            trials=tuple(self._trials),
            baseline_rounds=tuple(rounds),
            finalists=tuple(finalists),
            ladder=ladder,
            decision=self._decide(headroom, ladder),
            steps=dict(self._ledger.steps),
            wall_seconds=dict(self._ledger.wall_seconds),
        )
        self._observer.finished(outcome)
        return outcome

    def _headroom(self) -> tuple[TrialRecord, float, Block]:
        """The step as written, and the same with DDP's reduction off, in turn."""
        ledger = self._ledger
        ledger.phase = "baseline"
        pilot = ledger.block(AS_WRITTEN, warmup=1, steps=2)
        pace = Pace(pilot.median)
        on, off = [], []
        for _ in range(pace.headroom_rounds):
            ledger.phase = "headroom"
            off.append(ledger.block(AS_WRITTEN, 1, pace.block(pilot.median), reduce=False, turn=False))
            ledger.phase = "baseline"
            on.append(ledger.block(AS_WRITTEN, 1, pace.block(pilot.median), turn=False))
        baseline = TrialRecord(0, AS_WRITTEN, "measured", tuple(on))
        without = median([block.median for block in off])
        headroom = max(0.0, 1 - without / baseline.seconds)
        return baseline, headroom, Block(tuple(second for block in off for second in block.seconds))

    def _find_processors(self, baseline: TrialRecord) -> Configuration:
        """The CPUs and threads of a rank that all later trials have. First and alone: they weigh on every other knob.

        They can win where the reduction costs nothing, so they are tried whatever the headroom.
        """
        self._ledger.phase = "trials"
        best = baseline
        binding: list[dict[str, Value]] = [{NUMA_BINDING.name: "node"}] * (NUMA_BINDING.name in self._facts.knobs)
        counts: list[dict[str, Value]] = [{THREADS.name: count} for count in self._facts.thread_counts]
        tried = [*binding, *counts][: self._plan.trials // _SHARE_FOR_PROCESSORS]
        for number, values in enumerate(tried, start=1):
            kept = {name: value for name, value in best.configuration.items() if name not in values}
            trial = self._measured(number, Configuration({**kept, **values}), self._best_of(Rung.EXACT))
            self._add(trial)
            if trial.state == "measured" and trial.seconds < min(best.seconds, baseline.seconds * (1 - WORTHWHILE)):
                best = trial
        return best.configuration

    def _run_trials(self, held: Configuration) -> None:
        spaces = [Space(rung, self._facts, held) for rung in Rung]
        samplers = {space.rung: Sampler(space, self._plan.seed) for space in spaces if not space.empty}
        numbers = range(len(self._trials) + 1, self._live_trials + 1)
        for number, rung in zip(numbers, self._turns(list(samplers)), strict=False):
            if self._ledger.spent > self._plan.budget:
                break
            self._add(self._trial(number, rung, samplers[rung]))

    @property
    def _live_trials(self) -> int:
        """Trials that need no start of their own."""
        enough = bool(self._facts.start_settings) and self._plan.trials >= 2 * RESERVED
        return self._plan.trials - (RESERVED if enough else 0)

    def _with_starts(
        self, baseline: TrialRecord, rounds: list[Block], finalists: list[Standing]
    ) -> tuple[list[Block], list[Standing]]:
        """The final rounds, with the finalists that a setting of another start has added, if one gains."""
        room = self._plan.trials >= 2 * RESERVED and self._ledger.spent <= self._plan.budget
        if not self._facts.start_settings or not room:
            return rounds, finalists
        self._ledger.phase = "starts"
        seconds = {AS_WRITTEN: baseline.seconds, **{s.configuration: s.seconds for s in ladder_of(finalists)}}
        # Several links carry several buckets at once, and none carries a part of one.
        seconds |= {t.configuration: t.seconds for t in self._best_with_several_buckets()}
        starts = Starts(self._ledger, self._pace, seconds, self._add_start)
        try:
            blocks = starts.run(self._facts.start_settings)
        except TuningOver:  # what was found before stays found
            return rounds, finalists
        if not blocks:
            return rounds, finalists
        rounds = blocks.pop(AS_WRITTEN)
        return rounds, [_standing(c, rounds, found) for c, found in blocks.items()]

    def _best_with_several_buckets(self) -> list[TrialRecord]:
        mib = self._facts.gradient_bytes / MIB
        good = [t for t in self._trials if t.state != "failed" and _buckets(t.configuration, mib) > 2]
        return sorted(good, key=lambda trial: trial.seconds)[:1]

    def _add_start(self, configuration: Configuration, blocks: Sequence[Block], failure: str) -> TrialRecord:
        state: State = "failed" if failure else "measured"
        record = TrialRecord(len(self._trials) + 1, configuration, state, tuple(blocks), failure)
        self._add(record)
        return record

    def _add(self, record: TrialRecord) -> None:
        self._trials.append(record)
        spent = self._ledger.wall_seconds["trials"] + self._ledger.wall_seconds["starts"]
        left = spent / record.number * max(0, self._plan.trials - record.number)
        best = min((t for t in self._trials if t.state != "failed"), key=lambda t: t.seconds, default=None)
        self._observer.trial(record, self._plan.trials, best, left)

    @staticmethod
    def _turns(rungs: list[Rung]) -> Iterator[Rung]:
        """Rungs take turns, so that each has its share however many trials there are."""
        return cycle(rungs) if rungs else iter(())

    def _trial(self, number: int, rung: Rung, sampler: Sampler) -> TrialRecord:
        configuration = sampler.ask(self._guilty)
        record = self._measured(number, configuration, self._best_of(rung))
        if record.state == "failed" and len(configuration) == 1:
            self._guilty |= set(configuration.items())  # it alone differs from what runs
        sampler.tell(None if record.state == "failed" else record.seconds)
        return record

    def _best_of(self, rung: Rung) -> float:
        good = [t.seconds for t in self._trials if t.configuration.rung is rung and t.state != "failed"]
        return min(good, default=float("inf"))

    def _measured(self, number: int, configuration: Configuration, best: float) -> TrialRecord:
        pace = self._pace
        try:
            first = self._ledger.block(configuration, pace.warmup_of(configuration), pace.block(pace.step))
            if first.median > best * (_HOPELESS_AT_FIRST if pace.gains(first.median) else _HOPELESS):
                why = f"{first.median / best:.2f} times the best of its rung"
                return TrialRecord(number, configuration, "cut short", (first,), why)
            if Pace(first.median).slow:
                return TrialRecord(number, configuration, "measured", (first,))
            second = self._ledger.block(configuration, 0, pace.block(first.median), turn=False)
        except TrialFailed as failure:
            return TrialRecord(number, configuration, "failed", (), str(failure))
        return TrialRecord(number, configuration, "measured", (first, second))

    def _finals(self, baseline: TrialRecord) -> tuple[list[Block], list[Standing]]:
        """The best few of each rung and the baseline, in turn, each round in a new order."""
        self._ledger.phase = "finals"
        contenders = [c for rung in Rung for c in self._contenders(rung)]
        blocks: dict[Configuration, list[Block]] = {c: [] for c in (AS_WRITTEN, *contenders)}
        expected = {t.configuration: t.seconds for t in (*self._trials, baseline)}
        planned = self._pace.final_rounds if contenders else 0
        for number in range(1, planned + 1):
            for configuration in self._random.sample(list(blocks), len(blocks)):
                try:
                    steps = self._pace.block(expected[configuration])
                    warmup = self._pace.warmup_of(configuration)
                    blocks[configuration].append(self._ledger.block(configuration, warmup, steps))
                except TrialFailed:
                    del blocks[configuration]  # it ran in its trial and fails now: not to be launched
            self._observer.final(number, planned)
        rounds = blocks.pop(AS_WRITTEN, [])
        return rounds, [_standing(c, rounds, found) for c, found in blocks.items() if len(found) == len(rounds) > 1]

    def _contenders(self, rung: Rung) -> list[Configuration]:
        of_rung = [t for t in self._trials if t.configuration.rung is rung and t.state != "failed" and t.configuration]
        ranked = sorted(of_rung, key=lambda t: t.seconds)
        seconds = {t.configuration: t.seconds for t in reversed(ranked)}  # each at its best
        distinct = sorted(seconds, key=lambda configuration: seconds[configuration])
        if not distinct or not self._plan.allow.allows(rung):
            return distinct[:1]
        # Where a step costs little beside the baseline's, none that a trial could not tell from the best is left out.
        tied = [c for c in distinct if seconds[c] <= seconds[distinct[0]] * _TIED and self._pace.gains(seconds[c])]
        return distinct[: max(_FINALISTS, min(len(tied), _MOST_FINALISTS))]

    def _decide(self, headroom: float, ladder: tuple[Standing, ...]) -> Decision:
        if headroom < WORTHWHILE and not self._trials:
            why = f"only {headroom:.1%} of the step could be won, so no trial was run: your settings stay"
            return Decision(AS_WRITTEN, why)
        return decide(ladder, self._plan.allow, headroom)


def _buckets(configuration: Configuration, mib: float) -> float:
    """About how many buckets it cuts that many MiB into; 1 where the script decides."""
    plan = configuration.plain().get("bucket_cap_mb_list")
    if plan:
        return len(plan)
    cap = configuration.get("bucket_cap_mb")
    return mib / cap if isinstance(cap, (int, float)) else 1.0


def _standing(configuration: Configuration, rounds: list[Block], blocks: list[Block]) -> Standing:
    gain = speedup([b.median for b in rounds], [b.median for b in blocks])
    return Standing(configuration, median([b.median for b in blocks]), gain, tuple(blocks))
