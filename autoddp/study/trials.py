"""The trials of a study: which configuration is measured next, for how long, and what is kept of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from autoddp.knobs import (
    AS_WRITTEN,
    GRADIENT_RUNGS,
    TRIED_FIRST,
    Configuration,
    GradientError,
    Rung,
    Value,
    why_refused,
)
from autoddp.knobs.ddp_arguments import BUCKET_CAP_MB, BUCKET_CAP_MB_LIST
from autoddp.knobs.hook import HOOK, POWERSGD_BATCHED, POWERSGD_RANK, hooks_on
from autoddp.knobs.micro_batches import ACCUMULATE_STEPS, step_counts
from autoddp.settings import StudySettings
from autoddp.study.budget import FEWEST_ROUNDS, FINALISTS, StepBudget
from autoddp.study.cost import Cost
from autoddp.study.first_guess import first_cap
from autoddp.study.measure import TrialFailed
from autoddp.study.observer import Observer
from autoddp.study.outcome import WORTHWHILE, State, TrialRecord
from autoddp.study.space import Sampler, Space
from autoddp.timing import Block
from autoddp.units import MIB
from autoddp.wire import JobFacts

_HOPELESS = 1.15  # times the rung's best, after the first block: measured no further
_HOPELESS_AT_FIRST = 1.5  # where the first block is short beside the second, and still warming up
_SHARE_FOR_COMPUTING = 4  # one trial of so many, at most, looks for what makes computing itself faster
_SHARE_FOR_ACCUMULATION = 4  # likewise, how many steps to make one


class Trials:
    """`records` are all trials so far, failed and refused ones among them."""

    def __init__(
        self, cost: Cost, facts: JobFacts, asked: StudySettings, observer: Observer, baseline: TrialRecord
    ) -> None:
        self._cost = cost
        self._facts = facts
        self._asked = asked
        self._observer = observer
        self._baseline = baseline
        self._budget = StepBudget(baseline.seconds)
        self._excluded: frozenset[tuple[str, Value]] = frozenset()
        self.records: list[TrialRecord] = []
        self.no_time = False
        """Whether trials were left out because there was no time for them."""
        self.errors: dict[Configuration, GradientError] = {}
        """Hook and rank → how far its gradients are from the exact mean; buckets make no difference to that."""

    def find_computing(self) -> Configuration:
        """The CPUs, threads, compiled pieces and graphs that all later trials have: they weigh on all other knobs.

        They can win where the reduction costs nothing, so they are tried whatever the headroom.
        """
        self._cost.phase = "trials"
        best = self._baseline
        offered = [knob for knob in TRIED_FIRST if knob.name in self._facts.knobs]
        settings = [setting for knob in offered for setting in knob.settings(self._facts)]
        for values in settings[: self._asked.trials // _SHARE_FOR_COMPUTING]:
            if not self._has_time():
                break
            kept = {name: value for name, value in best.configuration.items() if name not in values}
            trial = self._measured(Configuration({**kept, **values}))
            gains = trial.seconds < min(best.seconds, self._baseline.seconds * (1 - WORTHWHILE))
            if trial.state == "measured" and gains:
                best = trial
        return best.configuration

    def run(self, fixed: Configuration, last: int, computing: float) -> None:
        """Optuna's, up to trial number `last`, as long as there is time; all have the values `fixed`.

        `computing`: seconds of a step without any reduction.
        """
        self._cost.phase = "trials"
        spaces = [Space(rung, self._facts, fixed, self._first_cap(rung, computing)) for rung in GRADIENT_RUNGS]
        samplers = {space.rung: Sampler(space, self._asked.seed) for space in spaces if not space.empty}
        turns = deque(samplers)  # so that each rung has its share however many trials there are
        while turns and len(self.records) < last and self._has_time():
            rung = turns.popleft()
            if self._trial(samplers[rung]):
                turns.append(rung)

    def _has_time(self) -> bool:
        """Whether another trial leaves enough time for the final rounds that a decision needs."""
        best = [c for rung in Rung for c in self.best_of(rung)[:FINALISTS]]
        finalists = [(c, self.seconds_of(c.rung)[c]) for c in best]
        finalists += [(AS_WRITTEN, self._baseline.seconds)] * 2  # itself, and what the trial may add
        finals = FEWEST_ROUNDS * sum(self._budget.round_of(*finalist) for finalist in finalists)
        self.no_time = self._cost.left <= self._budget.trial() + finals
        return not self.no_time

    @property
    def kept_for_accumulation(self) -> int:
        """Trials that `accumulate` will need."""
        if ACCUMULATE_STEPS.name not in self._facts.knobs:
            return 0
        return min(
            len(step_counts(self._asked.accumulate_up_to)), max(1, self._asked.trials // _SHARE_FOR_ACCUMULATION)
        )

    def accumulate(self, fixed: Configuration) -> None:
        """Several of the script's steps in one, on top of the fastest that the user allows: the most steps first."""
        allowed = [t for t in self.records if t.usable and self._asked.allows(t.configuration)]
        fastest = min(allowed, key=lambda trial: trial.seconds, default=self._baseline)
        base = {**fixed, **(fastest.configuration if fastest.seconds < self._baseline.seconds else {})}
        for replaced in ACCUMULATE_STEPS.replaces:
            base.pop(replaced, None)
        for count in step_counts(self._asked.accumulate_up_to)[: self.kept_for_accumulation]:
            if self._has_time():
                self._measured(Configuration({**base, ACCUMULATE_STEPS.name: count}))

    def _first_cap(self, rung: Rung, computing: float) -> float | None:
        """None where the link was not measured; low-rank factors are too small for the size to matter."""
        share = next((hook.share for hook in hooks_on(rung)), 1.0)  # of the bytes travels
        if share is None or self._facts.link is None:
            return None
        return first_cap(self._facts.link, self._facts.gradient_bytes, computing, share)

    def add_start(self, configuration: Configuration, blocks: Sequence[Block], failure: str) -> TrialRecord:
        """Keep what was measured in another start of the script."""
        state: State = "failed" if failure else "measured"
        return self._add(configuration, state, blocks, failure)

    def best_of(self, rung: Rung) -> list[Configuration]:
        """Distinct configurations of a rung that ran, the fastest first."""
        seconds = self.seconds_of(rung)
        return sorted(seconds, key=lambda configuration: seconds[configuration])

    def seconds_of(self, rung: Rung) -> dict[Configuration, float]:
        """Configuration of that rung → seconds per step, each at its best."""
        ran = [t for t in self.records if t.configuration.rung is rung and t.usable and t.configuration]
        return {t.configuration: t.seconds for t in sorted(ran, key=lambda t: t.seconds, reverse=True)}

    def best_with_several_buckets(self) -> list[TrialRecord]:
        """The fastest of those that keep several links busy, if there is one."""
        mib = self._facts.gradient_bytes / MIB
        good = [t for t in self.records if t.usable and _buckets(t.configuration, mib) > 2]
        return sorted(good, key=lambda trial: trial.seconds)[:1]

    def _trial(self, sampler: Sampler) -> bool:
        """False if this rung has nothing left that may be tried."""
        configuration = sampler.ask(self._excluded)
        if configuration is None:
            return False
        record = self._measured(configuration)
        if record.state == "failed" and len(configuration) == 1:
            self._excluded |= set(configuration.items())  # it alone differs from what runs
        if record.state == "refused":
            self._excluded |= {_to_blame(configuration.hook)}
        sampler.tell(record.seconds if record.usable else None)
        return True

    def _measured(self, configuration: Configuration) -> TrialRecord:
        budget, best = self._budget, min(self.seconds_of(configuration.rung).values(), default=float("inf"))
        at_once = configuration.steps_per_update
        try:
            first = self._cost.block(configuration, budget.warmup_of(configuration), budget.block(budget.step, at_once))
            limit = best * (_HOPELESS_AT_FIRST if budget.gains(first.median) else _HOPELESS)
            hopeless = first.median > limit
            # 16 bits are compared even where they are slow: the cause may be overflow, and the user should know it.
            error, refused = (
                (None, "") if hopeless and configuration.rung.has_error_feedback else self._compared(configuration)
            )
            if refused:
                return self._add(configuration, "refused", [first], refused, error)
            if hopeless:
                why = f"{first.median / best:.2f} times the best of its rung"
                return self._add(configuration, "cut short", [first], why, error)
            if StepBudget(first.median).slow:
                return self._add(configuration, "measured", [first], "", error)
            settling = budget.settling(first.median)
            second = self._cost.block(configuration, settling, budget.block(first.median, at_once), turn=False)
        except TrialFailed as failure:
            return self._add(configuration, "failed", [], str(failure))
        return self._add(configuration, "measured", [first, second], "", error)

    def _compared(self, configuration: Configuration) -> tuple[GradientError | None, str]:
        """The error of a hook that was not compared yet, and why it is refused; of the configuration now in effect."""
        hook = configuration.hook
        if not hook or hook in self.errors:
            return None, ""
        error = self._cost.compare(configuration, self._budget.compared(configuration.rung))
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
        record = TrialRecord(len(self.records) + 1, configuration, state, tuple(blocks), why, error)
        self.records.append(record)
        spent = self._cost.wall_seconds["trials"] + self._cost.wall_seconds["starts"]
        left = spent / record.number * max(0, self._asked.trials - record.number)
        best = min((t for t in self.records if t.usable), key=lambda t: t.seconds, default=None)
        self._observer.trial(record, self._asked.trials, best, left)
        return record


def _to_blame(hook: Configuration) -> tuple[str, Value]:
    """Of what decides over the gradients, the part that took most from them."""
    name = next(name for name in (POWERSGD_BATCHED.name, POWERSGD_RANK.name, HOOK.name) if name in hook)
    return name, hook[name]


def _buckets(configuration: Configuration, mib: float) -> float:
    """About how many buckets it cuts that many MiB into; 1 where the script decides."""
    plan, cap = BUCKET_CAP_MB_LIST.of(configuration), BUCKET_CAP_MB.of(configuration)
    if plan:
        return len(plan)
    return mib / cap if cap else 1.0
