"""A study, from headroom to decision. It is deterministic for a seed and a sequence of measurements.

So a launcher that takes over a study can replay its journal through this code and go on where the first one stopped.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autoddp.knobs import AS_WRITTEN, BY_NAME, GRADIENT_RUNGS, Configuration, Rung, Value
from autoddp.knobs.computing import OPTIMIZE_DDP, REDUCE_OVERHEAD
from autoddp.knobs.micro_batches import larger_batch
from autoddp.predict import profile_of
from autoddp.recipe import best_allowed
from autoddp.recipe.decision import WORTH_A_CHANGE
from autoddp.settings import StudySettings
from autoddp.study.budget import FEWEST_ROUNDS, FINALISTS, StepBudget
from autoddp.study.cost import Cost
from autoddp.study.env_trials import RESERVED, EnvTrials, Screen, screened
from autoddp.study.forecast import Forecast
from autoddp.study.measure import Diagnose, Diagnosis, FailsWithoutReduction, Measure, TrialFailed, TuningOver
from autoddp.study.observer import Observer
from autoddp.study.outcome import WORTHWHILE, Decision, Outcome, Screened, Standing, TrialRecord
from autoddp.study.semifinals import Semifinal, contenders, run_semifinal
from autoddp.study.trials import Trials
from autoddp.timing import Block, Headroom, difference, headroom, median, speedup
from autoddp.timing.timeline import Timeline
from autoddp.units import percent
from autoddp.wire import JobFacts

_SHARE_FOR_DIAGNOSIS = 0.25  # of the time that the trials may take
_AT_LEAST_FOR_DIAGNOSIS = 3.0  # seconds, which are little beside the start of the script
_FEWEST_FOR_DIAGNOSIS = 8  # steps: with fewer nothing can be said
_AT_LEAST_FOR_SETTINGS = 2 * RESERVED  # trials that a study must have: at least half stay for knobs without a start


class Study:
    """`Study(measure, facts, asked, observer, screen).run()`. Without `screen` no env setting is ruled out."""

    def __init__(
        self,
        measure: Measure,
        facts: JobFacts,
        asked: StudySettings,
        observer: Observer,
        screen: Screen = lambda settings: [],
        diagnose: Diagnose | None = None,
    ) -> None:
        self._cost = Cost(measure)
        self._facts = facts
        self._asked = asked
        self._observer = observer
        self._screen = screen
        self._diagnose = diagnose
        self._random = random.Random(asked.seed)
        self._semifinals: list[Semifinal] = []

    def run(self) -> Outcome:
        """Measure and decide.

        Raises TuningOver, or TrialFailed if the baseline itself fails, when there is nothing to decide on.
        """
        self._observer.ready(self._facts)
        baseline, won, off = self._headroom()
        without = Block(tuple(second for block in off for second in block.seconds))
        self._observer.baseline(baseline, won)
        self._budget = StepBudget(baseline.seconds)
        diagnosis = self._diagnosed(baseline, off)
        recorded = self._recorded(baseline) if won.high >= WORTHWHILE else ()
        forecast = self._forecast(recorded, baseline, without.median)
        self._trials = Trials(self._cost, self._facts, self._asked, self._observer, baseline, forecast)
        fixed = self._trials.find_computing()
        judged, settings = self._judge_settings(won)
        if won.high >= WORTHWHILE:
            kept = self._trials.kept_for_settings_on_top + self._trials.kept_for_accumulation
            kept += RESERVED if settings else 0
            self._trials.run(fixed, self._asked.trials - kept, without.median)
            self._trials.add_on_top(fixed)
            self._trials.accumulate(fixed)
        rounds: list[Block] = []
        finalists: list[Standing] = []
        if self._trials.records:
            rounds, finalists = self._finals(baseline)
        if settings and self._cost.left > 0:
            rounds, finalists = self._with_starts(settings, baseline, rounds, finalists)
        ladder = ladder_of(finalists)
        outcome = Outcome(
            facts=self._facts,
            baseline=baseline,
            headroom=won.share,
            headroom_interval=(won.low, won.high),
            headroom_block=without,
            diagnosis=diagnosis,
            trials=tuple(self._trials.records),
            baseline_rounds=tuple(rounds),
            finalists=tuple(finalists),
            ladder=ladder,
            decision=self._decide(won, ladder),
            screened=tuple(judged),
            semifinals=tuple(self._semifinals),
            steps=dict(self._cost.steps),
            compilations=self._cost.compilations,
            wall_seconds=dict(self._cost.wall_seconds),
            profile=forecast.profile,
            timelines=recorded,
        )
        self._observer.finished(outcome)
        return outcome

    def _headroom(self) -> tuple[TrialRecord, Headroom, list[Block]]:
        """Measure the script as written with and without DDP's reduction, alternating, to find what could be won.

        Returns the baseline, the headroom, and the steps without reduction, each with the time of its slowest rank.
        Where these are much shorter, more of them are measured: they tell what computing takes, and the first ones take
        longer. More rounds are measured while it is uncertain whether trials are worth running.
        """
        cost = self._cost
        cost.phase = "baseline"
        pilot = cost.block(AS_WRITTEN, warmup=1, steps=2)
        budget = StepBudget(pilot.median)
        on: list[Block] = []
        off: list[Block] = []
        diagnoses = self._diagnose is not None and self._asked.diagnose_budget != 0
        while len(on) < budget.headroom_rounds(diagnoses) or self._is_open(self._won(on, off), len(on), budget):
            cost.phase = "headroom"
            try:
                steps = budget.block(off[-1].median if off else pilot.median)
                off.append(cost.block(AS_WRITTEN, 1, steps, reduce=False, apply=False))
            except TrialFailed as failed:
                raise FailsWithoutReduction(str(failed)) from None
            cost.phase = "baseline"
            try:
                on.append(cost.block(AS_WRITTEN, 1, budget.block(pilot.median), apply=False))
            except TrialFailed as failed:
                raise FailsWithoutReduction(str(failed), "after") from None
        baseline = TrialRecord(0, AS_WRITTEN, "measured", tuple(on))
        return baseline, self._won(on, off), [Block(block.slowest) for block in off]

    def _won(self, on: Sequence[Block], off: Sequence[Block]) -> Headroom:
        """Nothing where no step of the script reduces: what two such blocks differ by is noise."""
        return headroom(on, off) if self._facts.micro_batches else Headroom(0.0, 0.0, 0.0)

    def _diagnosed(self, baseline: TrialRecord, off: Sequence[Block]) -> Diagnosis | None:
        """Why the job is slow. None where there is no time for it, or where finding out has failed."""
        asked = self._asked.diagnose_budget
        usual = max(_AT_LEAST_FOR_DIAGNOSIS, _SHARE_FOR_DIAGNOSIS * self._asked.trials * self._budget.trial())
        budget = min(usual if asked is None else asked, self._cost.left * _SHARE_FOR_DIAGNOSIS)
        if self._diagnose is None or budget < _FEWEST_FOR_DIAGNOSIS * baseline.seconds:
            return None
        before = [statistics.fmean(block.seconds) for block in baseline.blocks]
        after = [statistics.fmean(block.seconds) for block in off]
        try:
            found = self._diagnose(self._cost.recorded, budget, difference(before, after))
        except TrialFailed as failed:  # the job was started again, and is as it was
            self._observer.not_diagnosed(str(failed))
            return None
        self._observer.diagnosed(found)
        return found

    def _recorded(self, baseline: TrialRecord) -> tuple[Timeline, ...]:
        """Timelines of some steps as written, of each rank; empty where there is no time for it, or where it fails."""
        if self._cost.left < self._asked.trials * self._budget.trial():
            return ()
        try:
            return self._cost.timelines(AS_WRITTEN, self._budget.recorded)
        except TrialFailed:  # the job was started again, and is as it was
            return ()

    def _forecast(self, recorded: Sequence[Timeline], baseline: TrialRecord, computing: float) -> Forecast:
        """What predicts the trials. Jobs with several models, or several reductions a step, are not predicted."""
        facts = self._facts
        if "+" in facts.parameters_digest or facts.micro_batches != 1 or "the script registers" in str(facts.left_out):
            return Forecast()
        profile = profile_of(
            recorded,
            facts.gradient_shapes,
            facts.backend,
            facts.nodes,
            facts.ddp_arguments,
            min(computing, baseline.seconds),
            facts.link,
            facts.cores / facts.ranks_per_host,
        )
        try:
            return Forecast(profile, baseline.seconds)
        except ValueError:  # an argument of DDP, as text, from which its buckets cannot be told
            return Forecast()

    def _is_open(self, found: Headroom, rounds: int, budget: StepBudget) -> bool:
        """Whether more rounds are needed: likely there is nothing to win, but the interval allows for a gain."""
        unsure = found.share < WORTHWHILE <= found.high
        return unsure and rounds < budget.most_headroom_rounds and self._cost.left > rounds * budget.trial()

    def _judge_settings(self, won: Headroom) -> tuple[list[Screened], list[Mapping[str, Value]]]:
        """The communication benchmark's results for all env settings, and the settings that are worth trials.

        Where the reduction costs nothing, only those can be worth it that concern something else.
        """
        offered: Sequence[Configuration] = self._facts.start_settings
        if won.high < WORTHWHILE:
            offered = [setting for setting in offered if not all(BY_NAME[name].on_the_link for name in setting)]
        if not offered or self._asked.trials < _AT_LEAST_FOR_SETTINGS:
            return [], []
        with self._cost.in_phase("screening"):
            judged = screened(offered, self._screen)
        self._observer.screened(judged, RESERVED)
        seen = [one for one in judged if one.gain is not None]
        # No benchmark speaks for these settings, and each costs a start of the script: try one of them at most.
        unseen = [one for one in judged if one.gain is None][:1]
        return judged, [one.setting for one in (*seen, *unseen) if one.promising]

    def _with_starts(
        self,
        settings: list[Mapping[str, Value]],
        baseline: TrialRecord,
        rounds: list[Block],
        finalists: list[Standing],
    ) -> tuple[list[Block], list[Standing]]:
        """The final rounds: those given, or new ones with the finalists that an env setting adds, if one gains."""
        self._cost.phase = "starts"
        seconds = {AS_WRITTEN: baseline.seconds, **{s.configuration: s.seconds for s in ladder_of(finalists)}}
        # Several links can carry several buckets at once, but a single bucket is not split between links.
        seconds |= {t.configuration: t.seconds for t in self._trials.best_with_several_buckets()}
        starts = EnvTrials(self._cost, self._budget, seconds, self._trials.add_start)
        try:
            blocks = starts.run(settings)
        except TuningOver:  # the earlier results stay valid
            return rounds, finalists
        if not blocks:
            return rounds, finalists
        rounds = blocks.pop(AS_WRITTEN)
        return rounds, [self._standing(c, rounds, found) for c, found in blocks.items()]

    def _finals(self, baseline: TrialRecord) -> tuple[list[Block], list[Standing]]:
        """Measure the best few of each rung and the baseline in rounds, each round in a new order."""
        self._cost.phase = "finals"
        finalists = [c for rung in Rung for c in self._contenders(rung)]
        blocks: dict[Configuration, list[Block]] = {c: [] for c in (AS_WRITTEN, *finalists)}
        expected = {t.configuration: t.seconds for t in (*self._trials.records, baseline)}
        planned = self._planned_rounds(blocks, expected) if finalists else 0
        for number in range(1, planned + 1):
            try:
                self._final_round(blocks, expected)
            except TuningOver:
                whole_rounds = number - 1
                if whole_rounds < FEWEST_ROUNDS or self._facts.nodes > 1:  # other hosts may have fewer rounds
                    raise
                blocks = {c: found[:whole_rounds] for c, found in blocks.items()}  # the finished rounds are enough
                break
            self._observer.final(number, planned)
        rounds = blocks.pop(AS_WRITTEN, [])
        whole = {c: found for c, found in blocks.items() if len(found) == len(rounds) > 1}
        return rounds, [self._standing(c, rounds, found) for c, found in whole.items()]

    def _planned_rounds(self, finalists: Iterable[Configuration], expected: Mapping[Configuration, float]) -> int:
        """Number of final rounds: fewer where time is short, but never too few for a decision."""
        planned = self._budget.final_rounds(self._compiles_anew)
        seconds = sum(self._budget.round_of(c, expected[c]) for c in finalists)
        if self._cost.left >= planned * seconds:
            return planned
        return max(FEWEST_ROUNDS, int(self._cost.left / seconds))

    def _final_round(self, blocks: dict[Configuration, list[Block]], expected: Mapping[Configuration, float]) -> None:
        """Measure each configuration once, in random order; remove those that fail."""
        for configuration in self._random.sample(list(blocks), len(blocks)):
            try:
                steps = self._budget.final_block(expected[configuration], configuration.steps_per_update)
                warmup = self._budget.warmup_of(configuration, expected[configuration])
                blocks[configuration].append(self._cost.block(configuration, warmup, steps))
            except TrialFailed:
                del blocks[configuration]  # a configuration that ran in its trial and fails now must not be launched

    @property
    def _compiles_anew(self) -> bool:
        """Whether switching between two exact configurations may cost a compilation."""
        return OPTIMIZE_DDP.name in self._facts.knobs or REDUCE_OVERHEAD in self._facts.cuda_graphs

    def _contenders(self, rung: Rung) -> list[Configuration]:
        seconds, errors = self._trials.seconds_of(rung), self._trials.errors
        # A hook whose gradient error was not measured must not be launched.
        ranked = [c for c in self._trials.best_of(rung) if not c.hook or c.hook in errors]
        if not ranked or not self._asked.allows(ranked[0]):
            return ranked[:1]
        if self._budget.slow and seconds[ranked[0]] > self._budget.step * (1 - WORTHWHILE):
            return ranked[:1]  # none gains, so finding the best of them is not worth the time
        cheap = contenders(ranked, seconds, self._budget)
        # A semifinal takes about as long as the finals. Only exact configurations may differ in how they are compiled.
        if (
            not cheap
            or self._cost.left < 2 * self._budget.final_rounds() * self._budget.trial()
            or (self._compiles_anew and rung is Rung.EXACT)
        ):
            return ranked[:FINALISTS]
        self._observer.semifinal(rung, len(cheap))
        self._semifinals.append(run_semifinal(self._cost, self._budget, cheap, self._random))
        return self._semifinals[-1].ranked[:1]

    def _decide(self, won: Headroom, ladder: tuple[Standing, ...]) -> Decision:
        if won.high < WORTHWHILE and not self._trials.records:
            share, most = percent(won.share, ".1f"), percent(won.high, ".1f")
            surely = f"only {share} of the step could be won, surely no more than {most}"
            why = f"{surely}, so no trial was run: your settings stay"
            return Decision(AS_WRITTEN, why)
        if self._trials.no_time and not self._trials.records:
            why = f"there was no time for a trial: your settings stay; headroom {won}"
            return Decision(AS_WRITTEN, why)
        return decide(ladder, self._asked, won)

    def _standing(self, configuration: Configuration, rounds: list[Block], blocks: list[Block]) -> Standing:
        gain = speedup([b.median for b in rounds], [b.median for b in blocks])
        error = self._trials.errors.get(configuration.hook)
        return Standing(configuration, median([b.median for b in blocks]), gain, tuple(blocks), error)


# The ladder of a study, and its decision in words. What is launched of a ladder is decided in `recipe.decision`.


def ladder_of(finalists: Sequence[Standing]) -> tuple[Standing, ...]:
    """The fastest finalist of each rung by its paired rounds, exact first, each compared with all milder rungs."""
    best: list[Standing] = []
    for rung in Rung:
        of_rung = [standing for standing in finalists if standing.rung is rung]
        if of_rung:
            fastest = max(of_rung, key=lambda standing: standing.speedup.ratio)
            best.append(replace(fastest, speedup_low_over={other.rung: _low_over(fastest, other) for other in best}))
    return tuple(best)


def _low_over(standing: Standing, other: Standing) -> float:
    before, after = ([block.median for block in one.rounds] for one in (other, standing))
    return speedup(before, after).low


def decide(ladder: Sequence[Standing], asked: StudySettings, headroom: Headroom) -> Decision:
    """The decision on a ladder from `ladder_of`: what is launched, and why."""
    chosen = best_allowed(ladder, asked.allow, asked.accumulate_up_to)
    allowed = [standing for standing in ladder if asked.allows(standing.configuration)]
    if chosen is None:
        configuration = AS_WRITTEN
        why = f"no significant gain within what you allow ({asked.allowed}): your settings stay; headroom {headroom}"
    else:
        configuration = chosen.configuration
        why = f"the best of what you allow ({asked.allowed}): {chosen.speedup} against your settings"
        why += larger_batch(configuration.steps_per_update)
    why += _too_little(allowed, chosen)
    beyond = _beyond(ladder, asked)
    if beyond is None:
        return Decision(configuration, why)
    rung, best = beyond
    return Decision(configuration, f"{why}; --allow {rung.value} would give ×{_short(best.speedup.ratio)}", rung)


def _too_little(allowed: Sequence[Standing], chosen: Standing | None) -> str:
    """A clause that explains why an allowed and faster configuration is not launched; "" if there is none."""
    least = chosen.speedup.ratio if chosen else 1.0
    passed = [s for s in allowed if s is not chosen and s.speedup.sure and s.speedup.ratio > least]
    if not passed:
        return ""
    best = max(passed, key=lambda standing: standing.speedup.ratio)
    enough = f"surely {(WORTH_A_CHANGE - 1) * 100:.0f} % more than every milder rung and your settings"
    return f"; {best.rung.value} gives {best.speedup}, not {enough}: too little for a change of training"


def _beyond(ladder: Sequence[Standing], asked: StudySettings) -> tuple[Rung, Standing] | None:
    """The rung, and its best, that would be launched if the user allowed more: of several, the one with most gain."""
    further = [rung for rung in GRADIENT_RUNGS if not asked.allow.allows(rung)]
    found = {rung: best_allowed(ladder, rung, asked.accumulate_up_to) for rung in further}
    beyond = {rung: best for rung, best in found.items() if best and not asked.allows(best.configuration)}
    return max(beyond.items(), key=lambda one: one[1].speedup.ratio, default=None)


def _short(ratio: float) -> str:
    return f"{ratio:.{max(0, 2 - math.floor(math.log10(ratio)))}f}"
