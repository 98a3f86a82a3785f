"""A study, from headroom to decision. It is deterministic for a seed and a sequence of measurements.

So a launcher that takes over a study can replay its journal through this code and go on where the first one stopped.
"""

from __future__ import annotations

import collections
import contextlib
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoddp.knobs import AS_WRITTEN, BY_NAME, Configuration, Rung, Value
from autoddp.knobs.computing import OF_CORES, OPTIMIZE_DDP, REDUCE_OVERHEAD
from autoddp.knobs.job import NEVER_REDUCES
from autoddp.recipe.decision import WORTH_A_CHANGE
from autoddp.settings import StudySettings
from autoddp.study.budget import StepBudget
from autoddp.study.cost import Cost
from autoddp.study.decision import decide
from autoddp.study.env_trials import RESERVED, ROUNDS, EnvTrials, Screen, screened
from autoddp.study.finals import MOST_ROUNDS, Finals, ladder_of
from autoddp.study.forecast import Forecast, forecast_of, why_never
from autoddp.study.measure import INTERRUPTED, Diagnose, Diagnosis, Measure, TrialFailed, TuningOver
from autoddp.study.observer import Observer
from autoddp.study.outcome import WORTHWHILE, Decision, Outcome, Screened, Standing, TrialRecord
from autoddp.study.reserve import FEWEST_ROUNDS, Reserve
from autoddp.study.semifinals import Semifinal, contenders, run_semifinal, steps_of_semifinal
from autoddp.study.trials import Trials
from autoddp.timing import STAGES, Block, Headroom, RankSteps, difference, headroom
from autoddp.timing.timeline import Timeline
from autoddp.units import duration, percent, ratio
from autoddp.wire import AS_IT_IS, JobFacts

_SHARE_FOR_DIAGNOSIS = 0.25  # of the time that the trials may take
_AT_LEAST_FOR_DIAGNOSIS = 3.0  # seconds, which are little beside the start of the script
_FEWEST_FOR_DIAGNOSIS = 8  # steps: with fewer nothing can be said
_MUCH = 1.5  # times as fast: beside that a rung that gains nothing is not looked at again
_ROUNDS_OF_FINALS = 6  # that are usual
_TIMES_OF_FINALS = 3  # that they are made, where contenders fail in them
_LONG = 5.0  # seconds of a step, from which to find the headroom may take a minute
_AT_LEAST_FOR_SETTINGS = 2 * RESERVED  # trials that a study must have: at least half stay for knobs without a start
_BURSTS = 10  # of half a queue: it is empty by then if steps use it up a third faster than it fills
_LATE = 3  # bursts in a row whose batches came late: the loaders are the limit
_NEEDS_REDUCTION = (
    "its steps fail without DDP's reduction, so it is not known how long they compute; take out what makes them fail, "
    "such as a check that all ranks are alike, and tune it again"
)
_BEHIND = 1.2  # times as long as steps that find their batches ready: less is noise


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
        self._judged: list[Screened] = []
        self._diagnosis: Diagnosis | None = None
        self._recorded: tuple[Timeline, ...] = ()
        self._needs_reduction = ""
        """Why the script fails in steps without reduction, or after them; "" if it does not."""
        self._over = ""
        """Why tuning ended in a round of the headroom that is not needed; "" if it did not."""

    def run(self) -> Outcome:
        """Measure and decide. Whatever ends tuning, the decision rests on what was measured until then.

        Raises TuningOver, or TrialFailed if the baseline itself fails, when there is nothing to decide on.
        """
        self._observer.ready(self._facts)
        baseline, won, off = self._headroom()
        without = Block(tuple(second for block in off for second in block.seconds))
        self._observer.baseline(baseline, won)
        self._budget = StepBudget(baseline.seconds)
        self._reserve = Reserve(self._cost, self._budget)
        self._trials = Trials(self._cost, self._facts, self._asked, self._observer, baseline, self._reserve)
        costs, user = (self._cost, self._budget, self._reserve), (self._asked, self._observer)
        self._finals = Finals(*costs, *user, self._random, self._trials.errors, self._compiles_anew)
        ended, is_whole = "", False
        try:
            self._search(baseline, won, without.median if off else baseline.seconds)
            is_whole = True
            self._diagnosis = self._diagnosed(baseline, off)
        except TuningOver as over:
            ended = "" if is_whole and str(over) != INTERRUPTED else str(over)
        paired = self._finals.paired
        ladder = ladder_of(paired.finalists)
        outcome = Outcome(
            facts=self._facts,
            baseline=baseline,
            headroom=won.share,
            headroom_interval=(won.low, won.high),
            headroom_block=without,
            diagnosis=self._diagnosis,
            trials=tuple(self._trials.records),
            baseline_rounds=paired.rounds,
            finalists=paired.finalists,
            ladder=ladder,
            decision=self._decide(won, ladder, ended),
            screened=tuple(self._judged),
            semifinals=tuple(self._semifinals),
            steps=dict(self._cost.steps),
            compilations=self._cost.compilations,
            wall_seconds=dict(self._cost.wall_seconds),
            profile=self._trials.forecast.profile,
            why_no_profile=self._trials.forecast.why_not,
            timelines=self._recorded,
            length=self._cost.start.length,
            ended=ended,
        )
        self._observer.finished(outcome)
        return outcome

    def _search(self, baseline: TrialRecord, won: Headroom, computing: float) -> None:
        """Run trials, and the finals of the best of them. `computing`: seconds of a step without any reduction."""
        if self._over:
            raise TuningOver(self._over)
        trials, asked = self._trials, self._asked
        never = why_never(self._facts) or (_NEEDS_REDUCTION if self._needs_reduction else "")
        if never:
            trials.forecast = Forecast(why_not=never)
        settings: list[Mapping[str, Value]] | None = None
        paired = 0  # trials that the final rounds have known
        while True:
            if settings is None and self._has_plenty_of_time:
                if won.high >= WORTHWHILE:
                    self._record(baseline, computing)
                elif not never:
                    trials.forecast = Forecast(why_not=_little(won))
                settings = self._judge_settings(won)
            fixed = trials.find_computing()
            if won.high >= WORTHWHILE:
                kept = trials.kept_for_settings_on_top + trials.kept_for_accumulation
                kept += RESERVED if settings else 0
                trials.run(fixed, asked.trials - kept, computing)
                trials.add_on_top(fixed)
                trials.accumulate(fixed)
            if len(trials.records) > paired:
                self._make_finals(baseline, fixed)
                paired = len(trials.records)
            had_answer, trials.has_answer = trials.has_answer, bool(self._finals.paired.finalists)
            if not trials.no_time:
                break
            # Until the first final rounds they are what is needed most; from then on a script that ends has its answer.
            is_first = trials.has_answer and not had_answer
            if not is_first and not self._cost.take_longer(0.0 if paired else trials.needed):
                break
        if settings and self._affords_starts():
            self._with_starts(settings, baseline)
        elif settings:
            self._observer.no_time_for_starts(self._from_the_command + self._seconds_of_starts)

    @property
    def _from_the_command(self) -> float:
        """Seconds of a budget that are spent, at least.

        Without a budget the launcher's clock begins with the first step; what has failed last is not on it yet.
        """
        return max(self._cost.start.seconds + self._cost.spent, self._cost.total)

    @property
    def _seconds_of_starts(self) -> float:
        """Seconds of the starts with and without an env setting that prove its gain: fewer of them launch nothing."""
        return (1 + ROUNDS) * self._cost.start.seconds

    def _affords_starts(self) -> bool:
        if self._cost.left < self._seconds_of_starts:
            self._cost.take_longer(self._seconds_of_starts)  # of a script whose length nobody knows
        return self._cost.left > 0 and self._cost.left >= self._seconds_of_starts

    def _make_finals(self, baseline: TrialRecord, fixed: Configuration) -> None:
        """Final rounds of the best of each rung; where one fails in them, again with the next best."""
        expected = {t.configuration: t.seconds for t in (*self._trials.records, baseline)}
        if not self._finals.paired.rounds:
            self._cost.phase = "finals"
            self._finals.pace = self._pace_of_loaders(baseline, fixed)
        for _ in range(_TIMES_OF_FINALS):
            contenders = self._worth_rounds([c for rung in Rung if (c := self._contender(rung))], expected)
            failed = len(self._finals.failed)
            self._finals.run(contenders, expected)
            if len(self._finals.failed) == failed:
                break

    def _pace_of_loaders(self, baseline: TrialRecord, fixed: Configuration) -> float:
        """Seconds in which the loaders give the batches of a step; 0.0 where they keep up, or that cannot be found out.

        Worker processes load ahead, and while steps as written are timed their queues fill again. So a few faster steps
        find their batches ready, and those of a launched job do not. Steps without reduction are the fastest there are:
        they empty the queues, and wait for the loaders then. What else they take is measured here too: the headroom has
        other threads, and may hold such waits itself, which would count twice.
        """
        queued, start = 0 if self._needs_reduction else self._cost.queued, self._cost.start.number
        burst = max(1, queued // 2)  # workers load two batches ahead, or more
        # The cores that these leave to the workers decide how fast they load, so they are those of nearly all trials.
        cores = Configuration({name: value for name, value in fixed.items() if name in OF_CORES})
        found: list[float] = []
        while queued and len(found) < _BURSTS and self._affords_steps(burst, baseline.seconds):
            first = not found
            try:
                done = self._cost.recorded(cores, int(first), burst, reduce=False, apply=first, experiment=AS_IT_IS)
            except TrialFailed:  # the job was started again, and is as it was
                break
            if not done.ranks or self._cost.start.number != start:  # another start has full queues
                break
            found.append(_pace_of(done.ranks))
            if len(found) >= _LATE and min(found[-_LATE:]) > 0:
                return min(found[1 - _LATE :])  # the first of them may have begun with a queue
        return 0.0

    def _affords_steps(self, steps: int, step: float) -> bool:
        """Whether there is time for these before the final rounds, and room in this start of the script."""
        has_room = self._cost.steps_of(0, steps) == steps
        return has_room and self._reserve.can_pay([(AS_WRITTEN, step)], steps * step, steps)

    def _worth_rounds(
        self, contenders: Sequence[Configuration], expected: Mapping[Configuration, float]
    ) -> Sequence[Configuration]:
        """The contenders without those that gain nothing, if steps are long and another one that is allowed gains much.

        Trials of long steps are hardly noisy, and rounds of what gains nothing would take most of the time.
        """
        gain = {c: self._budget.step / expected[c] for c in contenders}
        most = max((gain[c] for c in contenders if self._asked.allows(c)), default=1.0)
        if not self._budget.slow or most < _MUCH:
            return contenders
        return [c for c in contenders if gain[c] > 1 + WORTHWHILE]

    @property
    def _has_plenty_of_time(self) -> bool:
        """Whether all trials that were asked for have time: then some may go to what the decision can do without."""
        return self._cost.left >= (self._asked.trials - len(self._trials.records)) * self._budget.trial()

    def _record(self, baseline: TrialRecord, computing: float) -> None:
        """Record some steps as written, for predictions."""
        with contextlib.suppress(TrialFailed):  # the job was started again, and is as it was
            in_effect = not self._trials.records
            self._recorded = self._cost.timelines(AS_WRITTEN, self._budget.recorded, in_effect)
        self._trials.forecast = forecast_of(self._facts, self._recorded, baseline.seconds, computing)

    def _headroom(self) -> tuple[TrialRecord, Headroom, list[Block]]:
        """Measure the script as written with and without DDP's reduction, alternating, to find what could be won.

        Returns the baseline, the headroom, and the steps without reduction, each with the time of its slowest rank.
        Where these are much shorter, more of them are measured: they tell what computing takes, and the first ones take
        longer. More rounds are measured while it is uncertain whether trials are worth running.

        A script may fail without reduction, or after it: it checks that its ranks are alike, or what it does depends on
        gradients, and each rank does something else then. What could be won stays unknown, and trials find it out.

        TuningOver, after the first three steps, where these are so long that no trial has time.
        """
        cost = self._cost
        cost.phase = "baseline"
        pilot = cost.block(AS_WRITTEN, warmup=1, steps=2)
        budget = StepBudget(pilot.median)
        self._require_time_for_a_trial(StepBudget(min(pilot.seconds)))  # in the other one the script may have saved
        on = [pilot] if budget.slow else list[Block]()  # of long steps each one counts
        off: list[Block] = []
        has_time = cost.left > self._asked.trials * budget.trial()
        diagnoses = self._diagnose is not None and self._asked.diagnose_budget != 0 and has_time
        least = budget.headroom_rounds(diagnoses)
        while len(off) < least or self._is_open(self._won(on, off), len(off), budget):
            cost.phase = "headroom"
            try:
                steps = budget.block(off[-1].median if off else pilot.median)
                off.append(cost.block(AS_WRITTEN, 1, steps, reduce=False, apply=False))
                if len(on) == len(off):
                    continue
                cost.phase = "baseline"
                on.append(cost.block(AS_WRITTEN, 1, budget.block(pilot.median), apply=False))
            except TrialFailed as failed:
                self._needs_reduction, off = str(failed), []
                break
            except TuningOver as over:
                if min(len(on), len(off)) < least:
                    raise
                self._over = str(over)
                del off[len(on) :]
                break
        cost.phase = "baseline"
        while len(on) < budget.headroom_rounds():
            on.append(cost.block(AS_WRITTEN, 1, budget.block(pilot.median), apply=False))
        baseline = TrialRecord(0, AS_WRITTEN, "measured", tuple(on))
        return baseline, self._won(on, off), [Block(block.slowest) for block in off]

    def _require_time_for_a_trial(self, budget: StepBudget) -> None:
        """TuningOver where steps are so long that there is surely no time for a trial, and for its final rounds."""
        before = (1 + budget.block(budget.step)) * budget.step
        least = before + budget.trial() + 2 * FEWEST_ROUNDS * budget.round_of(AS_WRITTEN, budget.step)
        if budget.step >= _LONG and self._cost.left_at_most < least:
            why = f"a step takes {duration(budget.step)}, so there is no time for a trial"
            raise TuningOver(f"{why}: {self._would_decide(budget, before)}")

    def _won(self, on: Sequence[Block], off: Sequence[Block]) -> Headroom:
        """Nothing where no step of the script reduces: what two such blocks differ by is noise."""
        if not self._facts.micro_batches:
            return Headroom(0.0, 0.0, 0.0)
        return Headroom(0.0, 0.0, 1.0, self._needs_reduction) if self._needs_reduction else headroom(on, off)

    def _diagnosed(self, baseline: TrialRecord, off: Sequence[Block]) -> Diagnosis | None:
        """Why the job is slow. None where there is no time for it, or where finding out has failed.

        It comes last, so that no trial and no final round is left out for it.
        """
        asked, step = self._asked.diagnose_budget, baseline.seconds
        usual = max(_AT_LEAST_FOR_DIAGNOSIS, _SHARE_FOR_DIAGNOSIS * self._asked.trials * self._budget.trial())
        budget = min(usual if asked is None else asked, self._cost.left * _SHARE_FOR_DIAGNOSIS)
        if self._diagnose is None or not off or budget < _FEWEST_FOR_DIAGNOSIS * step:
            return None
        if asked is None and not self._cost.affords(budget, budget / step):
            return None
        before = [statistics.fmean(block.seconds) for block in baseline.blocks]
        after = [statistics.fmean(block.seconds) for block in off]
        self._cost.phase = "diagnosis"
        try:
            found = self._diagnose(self._cost.recorded, budget, difference(before, after))
        except TrialFailed as failed:  # the job was started again, and is as it was
            self._observer.not_diagnosed(str(failed))
            return None
        self._observer.diagnosed(found)
        return found

    def _is_open(self, found: Headroom, rounds: int, budget: StepBudget) -> bool:
        """Whether more rounds are needed: likely there is nothing to win, but the interval allows for a gain."""
        unsure = found.share < WORTHWHILE <= found.high
        return unsure and rounds < budget.most_headroom_rounds and self._cost.left > rounds * budget.trial()

    def _judge_settings(self, won: Headroom) -> list[Mapping[str, Value]]:
        """The env settings that are worth trials, by the communication benchmark.

        Where the reduction costs nothing, only those can be worth it that concern something else.
        """
        offered: Sequence[Configuration] = self._facts.start_settings
        if won.high < WORTHWHILE:
            offered = [setting for setting in offered if not all(BY_NAME[name].on_the_link for name in setting)]
        if not offered or self._asked.trials < _AT_LEAST_FOR_SETTINGS:
            return []
        with self._cost.in_phase("screening"):
            self._judged = screened(offered, self._screen)
        self._observer.screened(self._judged, RESERVED)
        seen = [one for one in self._judged if one.gain is not None]
        # No benchmark speaks for these settings, and each costs a start of the script: try one of them at most.
        unseen = [one for one in self._judged if one.gain is None and one.promising][:1]
        return [one.setting for one in (*seen, *unseen) if one.promising]

    def _with_starts(self, settings: list[Mapping[str, Value]], baseline: TrialRecord) -> None:
        """New final rounds with the finalists that an env setting adds, if one gains."""
        self._cost.phase = "starts"
        ladder = ladder_of(self._finals.paired.finalists)
        seconds = {AS_WRITTEN: baseline.seconds, **{s.configuration: s.seconds for s in ladder}}
        # Several links can carry several buckets at once, but a single bucket is not split between links.
        seconds |= {t.configuration: t.seconds for t in self._trials.best_with_several_buckets()}
        starts = EnvTrials(self._cost, self._budget, seconds, self._trials.add_start)
        blocks = starts.run(settings)
        if blocks:
            self._finals.take(blocks)

    @property
    def _compiles_anew(self) -> bool:
        """Whether switching between two exact configurations may cost a compilation."""
        return OPTIMIZE_DDP.name in self._facts.knobs or REDUCE_OVERHEAD in self._facts.cuda_graphs

    def _contender(self, rung: Rung) -> Configuration | None:
        """The best of a rung. A hook whose gradient error was not measured, or is too large, must not be launched."""
        for best in self._ranked(rung):
            if best not in self._trials.seconds_of(rung):
                continue  # its hook was refused just now, for one before it
            if self._trials.vouches_for(best):
                return best
            self._finals.failed.add(best)
        return None

    def _ranked(self, rung: Rung) -> Sequence[Configuration]:
        """What may be launched of a rung, the best first: by a semifinal, if one is worth its time, then by trials."""
        seconds = self._trials.seconds_of(rung)
        ranked = [c for c in self._trials.best_of(rung) if c not in self._finals.failed]
        if not ranked or not self._asked.allows(ranked[0]):
            return ranked
        if self._budget.slow and seconds[ranked[0]] > self._budget.step * (1 - WORTHWHILE):
            return ranked  # none gains, so finding the best of them is not worth the time
        cheap, costs = contenders(ranked, seconds, self._budget), (self._cost, self._budget)
        # A semifinal takes about as long as the finals. Only exact configurations may differ in how they are compiled.
        takes, steps = _ROUNDS_OF_FINALS * self._budget.trial(), steps_of_semifinal(*costs, cheap)
        if not cheap or not self._cost.affords(2 * takes, steps) or (self._compiles_anew and rung is Rung.EXACT):
            return ranked
        self._observer.semifinal(rung, len(cheap))
        self._semifinals.append(run_semifinal(*costs, cheap, self._random))
        return [*self._semifinals[-1].ranked, *(c for c in ranked if c not in cheap)]

    def _decide(self, won: Headroom, ladder: tuple[Standing, ...], ended: str) -> Decision:
        # Without a headroom, settings of computing may gain all the same: there must have been time for them.
        if won.high < WORTHWHILE and not (self._trials.records or self._trials.no_time or ended):
            share, most = percent(won.share, ".1f"), percent(won.high, ".1f")
            surely = f"only {share} of the step could be won, surely no more than {most}"
            surely = surely if self._facts.micro_batches else NEVER_REDUCES
            why = f"{surely}, so no trial was run: your settings stay"
            return Decision(AS_WRITTEN, why)
        more = self._what_would_decide(ended)
        if not self._trials.records and (self._trials.no_time or ended):
            lacked = self._lacked_time(ended)
            reason = "there was no time for a trial" if lacked else "tuning ended before the first trial"
            why = f"{reason}: your settings stay; headroom {won}{more}"
            return Decision(AS_WRITTEN, why, is_open=True)
        if self._asked.trials and not self._trials.records:
            reasons = collections.Counter(self._facts.left_out.values()).most_common(1)
            because = f" ({reasons[0][0]})" if reasons else ""
            again = "; once that has changed, tune again with --trials 20" if reasons else ""
            why = f"nothing can be tried in this job{because}: your settings stay{again}; headroom {won}"
            return Decision(AS_WRITTEN, why)
        tried = [trial for trial in self._trials.records if trial.usable]
        if self._trials.records and not tried:
            last = self._trials.records[-1]
            why = f"no trial is of use (the last {last.state}: {last.reason}): your settings stay{more}"
            return Decision(AS_WRITTEN, why, is_open=bool(ended) or self._lacked_time(ended))
        if tried and not ladder:
            left = [trial for trial in tried if trial.configuration not in self._finals.failed]
            best = min(left or tried, key=lambda trial: (not self._asked.allows(trial.configuration), trial.seconds))
            gain = f"in its trial {best.configuration} was ×{ratio(self._budget.step / best.seconds)}"
            if not left and not ended:
                return Decision(AS_WRITTEN, f"{gain}, and it failed later: your settings stay")
            if not ended and all(trial.configuration.start_variables for trial in tried):
                why = "too little, or not sure in further starts, for a setting that is read at the start"
                return Decision(AS_WRITTEN, f"{gain}: {why}: your settings stay")
            shown = f"{gain}, which final rounds must prove"
            if best.seconds >= self._budget.step:
                shown = f"no trial was faster so far ({best.configuration}: ×{ratio(self._budget.step / best.seconds)})"
            return Decision(AS_WRITTEN, f"undecided: {shown}: your settings stay{more}", is_open=True)
        decision = decide(ladder, self._asked, won)
        if decision.configuration == AS_WRITTEN and ended and self._finals.failed:
            # What would have failed in any configuration may have failed in one that gains.
            decision = replace(decision, why=f"undecided: {decision.why}{more}", is_open=True)
        paired, rounds = self._finals.paired, len(self._finals.paired.rounds)
        if decision.configuration == AS_WRITTEN and not paired.is_settled:
            # Who has left the rounds has fewer. Where rounds differ much, a gain that has not shown may yet be there.
            running = [s for s in ladder if self._asked.allows(s.configuration)]
            best_one = max(running, key=lambda standing: (len(standing.rounds), standing.speedup.ratio))
            gain = f"{best_one.rung.value} gives {best_one.speedup} in {rounds} final rounds"
            if rounds < self._finals.most:
                why = f"undecided: {gain}, too few to be sure: your settings stay{more}"
                return replace(decision, why=why, is_open=True)
            if best_one.speedup.ratio > WORTH_A_CHANGE:
                busy = "this machine is busy, or the script's steps differ"
                return replace(decision, why=f"undecided: {gain}, which differ too much ({busy}): your settings stay")
        untried = " or ".join(rung.value for rung in self._trials.untried)
        if decision.configuration == AS_WRITTEN and untried and (self._trials.no_time or ended):
            why = f"undecided: nothing that was tried gains, and {untried} was not tried: your settings stay"
            return replace(decision, why=f"{why}; headroom {won}{more}", is_open=True)
        return decision

    def _what_would_decide(self, ended: str) -> str:
        """A clause that tells what tuning lacked, where that was time or steps; else why it ended."""
        if not self._lacked_time(ended):
            return f" ({ended})" if ended else ""
        length = self._cost.start.length
        job = f"your job has {length} steps, and " if length else ""
        return f"; {job}{self._would_decide(self._budget)}"

    def _lacked_time(self, ended: str) -> bool:
        """Whether tuning lacked time or steps; else something else has ended it."""
        twice = [(AS_WRITTEN, self._budget.step)] * 2
        return "--budget" in ended or self._trials.no_time or not self._reserve.can_pay(twice)

    def _would_decide(self, budget: StepBudget, more: float = 0.0) -> str:
        """The option that gives the time for a decision. `more`: seconds that are needed before the first trial."""
        finals = 3 * MOST_ROUNDS * budget.round_of(AS_WRITTEN, budget.step)
        needed = self._from_the_command + more + 3 * budget.trial() + finals + 3 * self._cost.start.seconds
        return f"--budget {math.ceil(needed / 60)}m would decide it"


def _little(won: Headroom) -> str:
    """Why the steps of a job were not recorded whose reductions cost next to nothing."""
    most = percent(won.high, ".1f")
    return f"its reductions take at most {most} of a step here, so no steps were recorded; tune it on more nodes"


def _pace_of(ranks: Sequence[RankSteps]) -> float:
    """Seconds of a step on the slowest of the ranks that wait for their loaders; 0.0 where none does.

    It need not be the one that waits longest: a host that computes more slowly has less to wait for.
    """
    found = map(_waits_and_rest, ranks)
    return max((waits + rest for waits, rest in found if waits > (_BEHIND - 1) * rest), default=0.0)


def _waits_and_rest(steps: RankSteps) -> tuple[float, float]:
    """Seconds for which a rank waits for batches in a step, and those of all else in a usual step of it.

    The mean of the waits counts, because batches come in bursts, one of each worker. Of the rest the median does: what
    the script does now and then, such as saving, is no fault of the loaders.
    """
    waits = [of_step[STAGES.index("data")] for of_step in steps.stages]
    rest = [seconds - waited for seconds, waited in zip(steps.seconds, waits, strict=True)]
    return statistics.fmean(waits), statistics.median(rest)
