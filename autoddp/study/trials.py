"""The trials of a study: each measures one configuration on the running job, and tells the sampler what it gave."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from autoddp.knobs import (
    AS_WRITTEN,
    GRADIENT_RUNGS,
    KNOBS,
    TRIED_FIRST,
    Configuration,
    GradientError,
    Phase,
    Rung,
    Setting,
    Value,
    why_refused,
)
from autoddp.knobs.ddp_arguments import BUCKET_CAP_MB, BUCKET_CAP_MB_LIST
from autoddp.knobs.hook import HOOK, POWERSGD_BATCHED, POWERSGD_RANK, hooks_on
from autoddp.knobs.micro_batches import ACCUMULATE_STEPS, step_counts
from autoddp.settings import StudySettings
from autoddp.study.budget import StepBudget
from autoddp.study.cost import Cost
from autoddp.study.first_guess import first_cap
from autoddp.study.forecast import Forecast
from autoddp.study.measure import TrialFailed
from autoddp.study.observer import Observer
from autoddp.study.outcome import WORTHWHILE, State, TrialRecord
from autoddp.study.prospects import Prospects
from autoddp.study.reserve import FEWEST_ROUNDS, Reserve
from autoddp.study.sampler import Sampler
from autoddp.study.space import Space
from autoddp.timing import Block
from autoddp.units import MIB
from autoddp.wire import JobFacts

_HOPELESS = 1.15  # times the seconds of the rung's best: a trial above it after the first block is cut short
_HOPELESS_AT_FIRST = 1.5  # the same where the first block is shorter than the second, and still warming up
_TO_SPARE = 1.1  # times the seconds that a first answer should take
_PASSED_OVER = 8  # configurations in a row that are left out because they are predicted to be hopeless
_SHARE_FOR_COMPUTING = 4  # at most one trial in four looks for settings that make computing itself faster
_SHARE_ON_TOP = 4  # at most one trial in four adds a setting to the best of the search
_SHARE_FOR_ACCUMULATION = 4  # at most one trial in four tries how many steps to make one


class Trials:
    """Runs and records trials. `records` has all trials so far, also those that failed or were refused."""

    def __init__(
        self,
        cost: Cost,
        facts: JobFacts,
        asked: StudySettings,
        observer: Observer,
        baseline: TrialRecord,
        reserve: Reserve,
    ) -> None:
        self._cost = cost
        self._reserve = reserve
        self._facts = facts
        self._asked = asked
        self._observer = observer
        self._baseline = baseline
        self._budget = StepBudget(baseline.seconds)
        self.forecast = Forecast()
        """Predicts the trials; set before the first of them."""
        self._excluded: frozenset[tuple[str, Value]] = frozenset()
        self._samplers: dict[Rung, Sampler] = {}
        self._prospects: dict[Rung, Prospects] = {}
        self._turns: deque[Rung] = deque()
        self._of_computing: deque[Setting] | None = None
        """Settings that `find_computing` has yet to try; None before its first call."""
        self._computes_best, self._fixed = baseline, AS_WRITTEN
        """The best that it has found, and the values that the samplers' trials have of it."""
        self.records: list[TrialRecord] = []
        self.no_time = False
        """Whether trials were left out for lack of time."""
        self.has_answer = False
        """Whether final rounds have been made."""
        self.are_enough = False
        """Whether trials were left out because nothing more was likely to come of them."""
        self.errors: dict[Configuration, GradientError] = {}
        """`Configuration.hook_with_error` → error of its gradients."""

    def find_computing(self) -> Configuration:
        """Find the CPU binding, threads, compiled pieces and CUDA graphs that all later trials use.

        They come first because they weigh on all other knobs. They are tried whatever the headroom is, because they
        can gain also where the reduction costs nothing. Called again, it goes on where there was no time.
        """
        self._cost.phase = "trials"
        if self._of_computing is None:
            offered = [knob for knob in TRIED_FIRST if knob.name in self._facts.knobs]
            settings = [setting for knob in offered for setting in knob.settings(self._facts)]
            self._of_computing = deque(settings[: self._asked.trials // _SHARE_FOR_COMPUTING])
        while self._of_computing and len(self.records) < self._asked.trials and self._has_time():
            values, best = self._of_computing.popleft(), self._computes_best
            kept = {name: value for name, value in best.configuration.items() if name not in values}
            trial = self._measured(Configuration({**kept, **values}))
            gains = trial.seconds < min(best.seconds, self._baseline.seconds * (1 - WORTHWHILE))
            if trial.state == "measured" and gains:
                self._computes_best = trial
        return self._computes_best.configuration

    def run(self, fixed: Configuration, last: int, computing: float) -> None:
        """Run the trials that Optuna chooses, up to trial number `last`, as long as there is time.

        All of them have the values `fixed`. `computing` is the seconds of a step without any reduction. May be called
        again, where there is more time than was known before.
        """
        self._cost.phase = "trials"
        if not self._samplers or fixed != self._fixed:
            self._fixed = fixed
            spaces = [Space(rung, self._facts, fixed, self._first_cap(rung, computing)) for rung in GRADIENT_RUNGS]
            seed, as_written = self._asked.seed, self._baseline.seconds
            self._samplers = {s.rung: Sampler(s, seed, self.forecast, as_written) for s in spaces if not s.empty}
            self._prospects = {s.rung: Prospects(s, self._asked, self._baseline.seconds) for s in spaces}
            self._turns = deque(self._samplers)
            if self._cost.left < self._asked.trials * self._budget.trial():  # begin with what is most likely to gain
                allowed = [rung for rung in self._turns if self._asked.allow.allows(rung)]
                self._turns = deque([*reversed(allowed), *(rung for rung in self._turns if rung not in allowed)])
        while self._turns and len(self.records) < last and self._has_time():
            rung = self._next_rung()
            self._turns.remove(rung)
            sampler, prospects = self._samplers[rung], self._prospects[rung]
            likely = prospects.best_untried(self.records, self.forecast)
            if self._asked.all_trials or prospects.is_open(self.records, likely, sampler.has_guesses):
                if likely:
                    sampler.prefer(likely.configuration)
                if self._trial(sampler):
                    self._turns.append(rung)
            elif not self.are_enough and len(self._turns) == 0:
                self.are_enough = True
                self._observer.enough(len(self.records), self._asked.trials)

    def _next_rung(self) -> Rung:
        """Rungs alternate, so each has its share, however many trials there are.

        At least half of all trials are of what the user allows, as long as that has something left to try.
        """
        allowed = sum(self._asked.allows(trial.configuration) for trial in self.records)
        others = len(self.records) - allowed
        may_be_others = others < allowed
        return next((r for r in self._turns if may_be_others or self._asked.allow.allows(r)), self._turns[0])

    def _has_time(self) -> bool:
        """Whether the final rounds that a decision needs can still be paid for after another trial.

        They need what may be launched and gains; as long as nothing does, a finalist that the trial may add. What gains
        is not put at stake before final rounds have proved it: there must be time for another start of the script.
        """
        best = [(c, self.seconds_of(rung)[c]) for rung in Rung for c in self.best_of(rung)[:1]]
        least = self._baseline.seconds * (1 - WORTHWHILE)
        finalists = [(c, seconds) for c, seconds in best if self._asked.allows(c) and seconds < least]
        at_stake = self._cost.seconds_if_it_ends if finalists and not self.has_answer else 0.0
        finalists = finalists or [(AS_WRITTEN, self._baseline.seconds)]
        budget, block = self._budget, self._budget.block(self._budget.step)
        steps = self._cost.steps_of(budget.warmup_of(AS_WRITTEN), block)
        steps += 0 if budget.slow else self._cost.steps_of(0, block)
        self.no_time = not self._reserve.can_pay(finalists, budget.trial() + at_stake, steps)
        return not self.no_time

    @property
    def untried(self) -> Sequence[Rung]:
        """The rungs that the user allows, that have something to try in this job, and of which no trial was run."""
        tried = {trial.configuration.rung for trial in self.records}
        return [rung for rung in self._samplers if self._asked.allow.allows(rung) and rung not in tried]

    @property
    def needed(self) -> float:
        """Seconds for a first trial, and for the final rounds of what it may find."""
        finals = FEWEST_ROUNDS * 2 * self._budget.round_of(AS_WRITTEN, self._baseline.seconds)
        return _TO_SPARE * (self._budget.trial() + finals)

    @property
    def kept_for_settings_on_top(self) -> int:
        """Number of trials that `add_on_top` will need."""
        return min(2 * len(self._settings_on_top), max(1, self._asked.trials // _SHARE_ON_TOP))  # on top of two bases

    @property
    def _settings_on_top(self) -> list[Setting]:
        """Settings that save the same time whatever the others are; `accumulate` has candidates of its own."""
        knobs = [knob for knob in KNOBS if knob.phase is Phase.LAST and knob.name in self._facts.knobs]
        return [setting for knob in knobs for setting in knob.settings(self._facts)]

    def add_on_top(self, fixed: Configuration) -> None:
        """Try settings on top of the fastest allowed configuration, then of the fastest that is exact."""
        exact = self._fastest(fixed, lambda configuration: configuration.rung is Rung.EXACT)
        bases = [self._fastest(fixed, self._asked.allows), exact]
        settings = self._settings_on_top
        tried = [Configuration({**base, **setting}) for base in dict.fromkeys(bases) for setting in settings]
        for configuration in tried[: self.kept_for_settings_on_top]:
            self._try_once(configuration)

    def _try_once(self, configuration: Configuration) -> None:
        is_new = all(trial.configuration != configuration for trial in self.records)
        if is_new and len(self.records) < self._asked.trials and self._has_time():
            self._measured(configuration)

    def _fastest(self, fixed: Configuration, fits: Callable[[Configuration], bool]) -> Configuration:
        """The fastest configuration that fits; `fixed`, if that is not faster than the script as written."""
        fitting = (t for t in self.records if t.usable and fits(t.configuration))
        found = min(fitting, key=lambda t: t.seconds, default=None)
        return found.configuration if found is not None and found.seconds < self._baseline.seconds else fixed

    @property
    def kept_for_accumulation(self) -> int:
        """Number of trials that `accumulate` will need."""
        if ACCUMULATE_STEPS.name not in self._facts.knobs:
            return 0
        return min(
            len(step_counts(self._asked.accumulate_up_to)), max(1, self._asked.trials // _SHARE_FOR_ACCUMULATION)
        )

    def accumulate(self, fixed: Configuration) -> None:
        """Try several of the script's steps as one, on top of the fastest allowed configuration; most steps first."""
        base = {**fixed, **self._fastest(fixed, self._asked.allows)}
        for replaced in ACCUMULATE_STEPS.replaces:
            base.pop(replaced, None)
        for count in step_counts(self._asked.accumulate_up_to)[: self.kept_for_accumulation]:
            self._try_once(Configuration({**base, ACCUMULATE_STEPS.name: count}))

    def _first_cap(self, rung: Rung, computing: float) -> float | None:
        """The cap to try first; None if the link was not measured, or if the bucket size hardly matters (low rank)."""
        share = next((hook.share for hook in hooks_on(rung)), 1.0)  # the part of the bytes that the hook sends
        if share is None or self._facts.link is None:
            return None
        return first_cap(self._facts.link, self._facts.gradient_bytes, computing, share)

    def add_start(self, configuration: Configuration, blocks: Sequence[Block], failure: str) -> TrialRecord:
        """Record a trial that was measured in another start of the script."""
        state: State = "failed" if failure else "measured"
        return self._add(configuration, state, blocks, failure)

    def best_of(self, rung: Rung) -> list[Configuration]:
        """Distinct usable configurations of a rung, the fastest first."""
        seconds = self.seconds_of(rung)
        return sorted(seconds, key=lambda configuration: seconds[configuration])

    def seconds_of(self, rung: Rung) -> dict[Configuration, float]:
        """Usable configuration of a rung → seconds per step in its best trial."""
        ran = [t for t in self.records if t.configuration.rung is rung and t.usable and t.configuration]
        return {t.configuration: t.seconds for t in sorted(ran, key=lambda t: t.seconds, reverse=True)}

    def best_with_several_buckets(self) -> list[TrialRecord]:
        """The fastest trial with enough buckets to keep several links busy, as a list of at most one."""
        mib = self._facts.gradient_bytes / MIB
        good = [t for t in self.records if t.usable and _buckets(t.configuration, mib) > 2]
        return sorted(good, key=lambda trial: trial.seconds)[:1]

    def _trial(self, sampler: Sampler) -> bool:
        """Run the next trial of a rung; False if the rung has nothing left that may be tried."""
        configuration = self._promising(sampler)
        if configuration is None:
            return False
        record = self._measured(configuration)
        if record.state == "failed" and len(configuration) == 1:
            self._excluded |= set(configuration.items())  # its one value is the only difference to what runs
        if record.state == "refused":
            self._excluded |= {_to_blame(configuration.hook)}
        sampler.tell(record.seconds if record.usable else None)
        return True

    def _promising(self, sampler: Sampler) -> Configuration | None:
        """The next configuration that is not predicted to be hopeless; the sampler is told the prediction of others."""
        configuration = sampler.ask(self._excluded)
        for _ in range(_PASSED_OVER):
            if configuration is None:
                return None
            best = min(self.seconds_of(configuration.rung).values(), default=float("inf"))
            if not self.forecast.is_hopeless(configuration, best):
                return configuration
            sampler.tell(self.forecast.seconds(configuration))
            configuration = sampler.ask(self._excluded)
        return configuration

    def _measured(self, configuration: Configuration) -> TrialRecord:
        budget, best = self._budget, min(self.seconds_of(configuration.rung).values(), default=float("inf"))
        at_once = configuration.steps_per_update
        try:
            steps = budget.block(budget.step, at_once)
            first = self._cost.undisturbed(configuration, budget.warmup_of(configuration), steps)
            limit = best * (_HOPELESS_AT_FIRST if budget.gains(first.median) else _HOPELESS)
            if first.median > limit and (more := budget.until_settled(first.median)):
                steps = budget.block(first.median, at_once)  # they are short: a verdict from a few would be noise
                first = self._cost.block(configuration, more, steps, apply=False)
            hopeless = first.median > limit
            # A 16-bit hook is compared even if it is slow: overflow may be the cause, and the user should learn of it.
            # Of the many that feed their error back one is compared here, and the best before the finals, where it is
            # another one: each costs exact reductions.
            later = configuration.rung.has_error_feedback and self._has_compared(configuration.rung)
            error, refused = (None, "") if later else self._compared(configuration)
            if refused:
                return self._add(configuration, "refused", [first], refused, error)
            if hopeless:
                why = f"{first.median / best:.2f} times the best of its rung"
                return self._add(configuration, "cut short", [first], why, error)
            if StepBudget(first.median).slow:
                return self._add(configuration, "measured", [first], "", error)
            settling = budget.settling(first.median)
            steps = budget.block(first.median, at_once)
            second = self._cost.undisturbed(configuration, settling, steps, apply=False)
        except TrialFailed as failure:
            return self._add(configuration, "failed", [], str(failure))
        return self._add(configuration, "measured", [first, second], "", error)

    def vouches_for(self, configuration: Configuration) -> bool:
        """Whether the gradient error of its hook is within the limits. It is measured now, if no trial has done so.

        Where it is not, all trials with that hook are refused.
        """
        hook = configuration.hook_with_error
        if hook and hook not in self.errors:
            try:
                self._cost.block(configuration, self._budget.warmup_of(configuration), 1)
                error, refused = self._compared(configuration)
            except TrialFailed as failure:
                error, refused = None, str(failure)
            if refused:
                state: State = "refused" if error else "failed"
                self.records = [
                    replace(one, state=state, reason=refused, error=error)
                    if one.configuration.hook_with_error == hook
                    else one
                    for one in self.records
                ]
                return False
        return not hook or hook in self.errors

    def _has_compared(self, rung: Rung) -> bool:
        """Whether the gradient error of a usable hook of this rung is known."""
        usable = (trial.configuration for trial in self.records if trial.usable)
        return any(one.rung is rung and one.hook_with_error in self.errors for one in usable)

    def _compared(self, configuration: Configuration) -> tuple[GradientError | None, str]:
        """Compare the hook in effect, if that was not done yet. Returns its error, and why it is refused or ""."""
        hook = configuration.hook_with_error
        if not hook or hook in self.errors:
            return None, ""
        error = self._cost.compare(configuration, self._budget.compared)
        if error is None:
            return None, ""
        self.errors[hook] = error
        return error, why_refused(configuration.rung, error, self._asked.limits)

    def _add(
        self,
        configuration: Configuration,
        state: State,
        blocks: Sequence[Block],
        why: str = "",
        error: GradientError | None = None,
    ) -> TrialRecord:
        predicted = self.forecast.seconds(configuration)
        record = TrialRecord(
            len(self.records) + 1,
            configuration,
            state,
            blocks=tuple(blocks),
            reason=why,
            error=error,
            predicted=predicted,
        )
        self.records.append(record)
        if record.blocks:
            self.forecast.measured(configuration, record.measured_seconds, predicted)
        spent = self._cost.wall_seconds["trials"] + self._cost.wall_seconds["starts"]
        left = spent / record.number * max(0, self._asked.trials - record.number)
        left = max(0.0, min(left, self._cost.left_at_most))  # the budget may be over first
        best = min((t for t in self.records if t.usable), key=lambda t: t.seconds, default=None)
        self._observer.trial(record, self._asked.trials, best, left)
        return record


def _to_blame(hook: Configuration) -> tuple[str, Value]:
    """The value of a refused hook to exclude from further trials: the one that removes most from the gradients."""
    name = next(name for name in (POWERSGD_BATCHED.name, POWERSGD_RANK.name, HOOK.name) if name in hook)
    return name, hook[name]


def _buckets(configuration: Configuration, mib: float) -> float:
    """Approximate number of buckets into which `configuration` cuts `mib` of gradients; 1 where the script decides."""
    plan, cap = BUCKET_CAP_MB_LIST.of(configuration), BUCKET_CAP_MB.of(configuration)
    if plan:
        return len(plan)
    return mib / cap if cap else 1.0
