"""The trials of a study: which configurations are worth trying, which comes next (Optuna chooses), and what it gave."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import optuna

from autoddp.knobs import (
    AS_WRITTEN,
    BY_NAME,
    GRADIENT_RUNGS,
    KNOBS,
    TRIED_FIRST,
    AnyKnob,
    Configuration,
    GradientError,
    Phase,
    Rung,
    Setting,
    Value,
    why_refused,
)
from autoddp.knobs.ddp_arguments import (
    BATCHED_GRAD_COPY,
    BUCKET_CAP_MB,
    BUCKET_CAP_MB_LIST,
    FIND_UNUSED,
    GRADIENT_AS_BUCKET_VIEW,
    STATIC_GRAPH,
)
from autoddp.knobs.hook import HOOK, POWERSGD_BATCHED, POWERSGD_RANK, Size, hooks_on
from autoddp.knobs.micro_batches import ACCUMULATE_STEPS, DEFER_REDUCTIONS, step_counts
from autoddp.settings import StudySettings
from autoddp.study.budget import FEWEST_ROUNDS, StepBudget
from autoddp.study.cost import Cost
from autoddp.study.first_guess import first_cap
from autoddp.study.forecast import Forecast
from autoddp.study.measure import TrialFailed
from autoddp.study.observer import Observer
from autoddp.study.outcome import WORTHWHILE, State, TrialRecord
from autoddp.timing import Block
from autoddp.units import MIB
from autoddp.wire import JobFacts

_UNGUIDED = 3  # results before TPE uses them; its default of ten random draws would be half of a study of twenty trials
_CANDIDATES = 48  # draws of which TPE takes the best: twice the default, because drawing costs nothing beside a trial
_ASKS = 40  # draws before a configuration that was measured already is accepted again
_NOTHING: Setting = {}
"""A knob left as the script wrote it."""
_HOPELESS = 1.15  # times the seconds of the rung's best: a trial above it after the first block is cut short
_HOPELESS_AT_FIRST = 1.5  # the same where the first block is shorter than the second, and still warming up
_TO_SPARE = 1.1  # times the seconds that a first answer should take
_PASSED_OVER = 8  # configurations in a row that are left out because they are predicted to be hopeless
_SHARE_FOR_COMPUTING = 4  # at most one trial in four looks for settings that make computing itself faster
_SHARE_ON_TOP = 4  # at most one trial in four adds a setting to the best of the search
_SHARE_FOR_ACCUMULATION = 4  # at most one trial in four tries how many steps to make one


@dataclass(frozen=True)
class Space:
    """All configurations of `rung` for a job with these facts. A configuration has one setting of each dimension.

    A dimension is named after its knob. Knobs that exclude each other share one dimension.
    """

    rung: Rung
    facts: JobFacts
    fixed: Configuration = AS_WRITTEN
    """Values that every configuration of this space has, because they were found before."""
    first_cap: float | None = None
    """The bucket cap, in MiB, that the measured link suggests; it is tried first. None if the link was not measured."""

    @cached_property
    def choices(self) -> dict[str, tuple[Setting, ...]]:
        """Dimension → its settings. The first setting leaves the knob as written, unless the knob must have a value."""
        found: dict[str, tuple[Setting, ...]] = {}
        for knob in KNOBS:
            settings = self._settings_of(knob)
            if knob.excludes in found:
                found[knob.excludes] += settings
            elif settings:
                found[knob.name] = settings if self._must_have(knob) else (_NOTHING, *settings)
        return {name: settings for name, settings in found.items() if len(settings) > 1}

    def _settings_of(self, knob: AnyKnob) -> tuple[Setting, ...]:
        """The candidates of `knob` on this rung that the job can have."""
        if knob.phase is not Phase.SEARCH or knob.name not in self.facts.knobs:
            return ()
        if knob.needs and not any(setting.get(knob.needs[0]) == knob.needs[1] for setting in self._hooks):
            return ()
        settings = self._hooks if knob is HOOK else knob.settings(self.facts)
        return tuple(setting for setting in settings if self.rung.allows(_rung_of(setting)))

    @property
    def _hooks(self) -> tuple[Setting, ...]:
        """The hooks of this rung itself: a hook of a milder rung belongs to that rung's space."""
        return tuple({HOOK.name: hook.name} for hook in hooks_on(self.rung))

    def _must_have(self, knob: AnyKnob) -> bool:
        return knob is HOOK or knob.required

    @property
    def empty(self) -> bool:
        """Whether this rung offers nothing to try here."""
        if self.rung is not Rung.EXACT:
            return HOOK.name not in self.facts.knobs or not self._hooks
        return not any(len(settings) > 1 for settings in self.choices.values())

    def configuration(self, chosen: Mapping[str, Setting]) -> Configuration:
        """The configuration that consists of one setting for each dimension."""
        values = dict(self.fixed)
        if len(self._hooks) == 1:
            values |= self._hooks[0]
        for setting in chosen.values():
            values |= setting
        for knob in (BY_NAME[name] for name in list(values)):
            if knob.needs and values.get(knob.needs[0]) != knob.needs[1]:
                del values[knob.name]  # it belongs to a value, such as a hook, that was not chosen
            for replaced in knob.replaces:
                values.pop(replaced, None)
        return Configuration(values)

    def guesses(self) -> list[dict[str, Setting]]:
        """The configurations to try first, the most promising first: the extremes of each knob, then combinations.

        Few large buckets pay the latency once and suit compressed gradients. With a shrinking plan only a small last
        bucket is sent after backward. The switches save copies.
        """
        view, batched = {GRADIENT_AS_BUCKET_VIEW.name: True}, {BATCHED_GRAD_COPY.name: True}
        sizes = self._sizes()
        if self.rung is Rung.EXACT:
            rows: list[Setting] = [view, {**sizes["tail"], **view}, batched]
            rows += [{**sizes["whole"], **view}, {**sizes["quarter"], **view}]
            if self._is_static_instead:
                rows.insert(0, _NOTHING)
        else:
            rows = [{**row, **view} for row in self._guesses_of_hooks(sizes)]
        likely: Setting = {BUCKET_CAP_MB.name: self.first_cap} if self.first_cap else _NOTHING
        if likely and likely in self.choices.get(BUCKET_CAP_MB.name, ()):
            sizes_of_buckets = (BUCKET_CAP_MB.name, BUCKET_CAP_MB_LIST.name)
            other = {name: value for name, value in rows[0].items() if name not in sizes_of_buckets}
            rows = [{**other, **likely}, *rows]
        return [self._complete(row) for row in rows]

    def _guesses_of_hooks(self, sizes: Mapping[Size, Setting]) -> list[Setting]:
        """Each hook with its best bucket size; then the first hook with other sizes, and with its own knobs set."""
        hooks = tuple(reversed(hooks_on(self.rung)))
        rows: list[Setting] = [{HOOK.name: hook.name, **sizes[hook.first_sizes[0]]} for hook in hooks]
        first = hooks[0]
        rows += [{HOOK.name: first.name, **sizes[size]} for size in first.first_sizes[1:]]
        own = [knob for knob in KNOBS if knob.needs == (HOOK.name, first.name) and knob.name in self.choices]
        return rows + [{**rows[0], **self.choices[knob.name][1]} for knob in own]

    def _sizes(self) -> dict[Size, Setting]:
        """Size → the setting that cuts the gradients that way; the setting as written where there is none."""
        settings = [setting for of_one in self.choices.values() for setting in of_one]
        found = [setting for setting in settings if BUCKET_CAP_MB.name in setting]
        plans = [setting for setting in settings if BUCKET_CAP_MB_LIST.name in setting]
        # The last cap holds all gradients and each before it is half as large: the third from the end is a quarter.
        return {
            "whole": found[-1] if found else _NOTHING,
            "quarter": found[max(0, len(found) - 3)] if found else _NOTHING,
            "tail": plans[0] if plans else _NOTHING,
        }

    def _complete(self, row: Setting) -> dict[str, Setting]:
        """`row` as a guess: a setting for every dimension of this job, and for no other."""
        complete = {name: _chosen(settings, row) for name, settings in self.choices.items()}
        if DEFER_REDUCTIONS.name in complete:  # a reduction that is left out is the fastest one
            complete[DEFER_REDUCTIONS.name] = self.choices[DEFER_REDUCTIONS.name][-1]
        if self._is_static_instead:
            complete[STATIC_GRAPH.name] = self.choices[STATIC_GRAPH.name][-1]
        return complete

    @property
    def _is_static_instead(self) -> bool:
        """Whether a static graph also ends a search for unused parameters, without which DDP sorts its buckets."""
        return STATIC_GRAPH.name in self.choices and self.facts.ddp_arguments.get(FIND_UNUSED) == "True"


class Sampler:
    """Asks Optuna's TPE for configurations of one rung, after the guesses of its space, the fastest by forecast first.

    sampler = Sampler(space, seed=0)
    configuration = sampler.ask()
    sampler.tell(0.123)

    The sequence is deterministic for a seed and the results.
    """

    def __init__(
        self, space: Space, seed: int, forecast: Forecast | None = None, as_written: float | None = None
    ) -> None:
        """`as_written`: seconds of the script as written, which is then not asked for."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space = space
        tpe = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_UNGUIDED, n_ei_candidates=_CANDIDATES)
        self._study = optuna.create_study(direction="minimize", sampler=tpe)
        guesses = space.guesses()
        for place in (forecast or Forecast()).order([space.configuration(guess) for guess in guesses]):
            guess = guesses[place]
            places = {name: space.choices[name].index(setting) for name, setting in guess.items()}
            self._study.enqueue_trial(places, skip_if_exists=True)
        self._pending: optuna.trial.Trial | None = None
        self._told: dict[Configuration, float | None] = {} if as_written is None else {AS_WRITTEN: as_written}

    def ask(self, excluded: Set[tuple[str, Value]] = frozenset()) -> Configuration | None:
        """The next configuration to measure, without any of the `excluded` values, which must not be launched.

        None if none seems to be left.
        """
        for _ in range(_ASKS):
            configuration = self._draw()
            if excluded & set(configuration.items()):
                self.tell(None)
            elif configuration in self._told:
                self.tell(self._told[configuration])
            else:
                return configuration
        configuration = self._draw()
        if not excluded & set(configuration.items()):
            return configuration
        self.tell(None)
        return None

    def _draw(self) -> Configuration:
        trial = self._study.ask()
        chosen = {
            name: settings[trial.suggest_categorical(name, range(len(settings)))]
            for name, settings in self._space.choices.items()
        }
        self._pending, self._asked = trial, self._space.configuration(chosen)
        return self._asked

    def tell(self, seconds: float | None) -> None:
        """Report the seconds per step of the configuration from the last `ask`; None if it failed."""
        assert self._pending is not None
        self._told[self._asked] = seconds
        if seconds is None:
            self._study.tell(self._pending, state=optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(self._pending, seconds)
        self._pending = None


class Trials:
    """Runs and records trials. `records` has all trials so far, also those that failed or were refused."""

    def __init__(
        self,
        cost: Cost,
        facts: JobFacts,
        asked: StudySettings,
        observer: Observer,
        baseline: TrialRecord,
    ) -> None:
        self._cost = cost
        self._facts = facts
        self._asked = asked
        self._observer = observer
        self._baseline = baseline
        self._budget = StepBudget(baseline.seconds)
        self.forecast = Forecast()
        """Predicts the trials; set before the first of them."""
        self._excluded: frozenset[tuple[str, Value]] = frozenset()
        self._samplers: dict[Rung, Sampler] = {}
        self._turns: deque[Rung] = deque()
        self.records: list[TrialRecord] = []
        self.no_time = False
        """Whether trials were left out for lack of time."""
        self.errors: dict[Configuration, GradientError] = {}
        """Hook with its own knobs → error of its gradients; the buckets do not matter for it."""

    def find_computing(self) -> Configuration:
        """Find the CPU binding, threads, compiled pieces and CUDA graphs that all later trials use.

        They come first because they weigh on all other knobs. They are tried whatever the headroom is, because they
        can gain also where the reduction costs nothing.
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
        """Run the trials that Optuna chooses, up to trial number `last`, as long as there is time.

        All of them have the values `fixed`. `computing` is the seconds of a step without any reduction. May be called
        again, where there is more time than was known before.
        """
        self._cost.phase = "trials"
        if not self._samplers:
            spaces = [Space(rung, self._facts, fixed, self._first_cap(rung, computing)) for rung in GRADIENT_RUNGS]
            seed, as_written = self._asked.seed, self._baseline.seconds
            self._samplers = {s.rung: Sampler(s, seed, self.forecast, as_written) for s in spaces if not s.empty}
            self._turns = deque(self._samplers)
            if self._cost.left < self._asked.trials * self._budget.trial():  # begin with what is most likely to gain
                allowed = [rung for rung in self._turns if self._asked.allow.allows(rung)]
                self._turns = deque([*reversed(allowed), *(rung for rung in self._turns if rung not in allowed)])
        while self._turns and len(self.records) < last and self._has_time():
            rung = self._next_rung()
            self._turns.remove(rung)
            if self._trial(self._samplers[rung]):
                self._turns.append(rung)

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

        They need what may be launched and gains; as long as nothing does, a finalist that the trial may add.
        """
        best = [(c, self.seconds_of(rung)[c]) for rung in Rung for c in self.best_of(rung)[:1]]
        least = self._baseline.seconds * (1 - WORTHWHILE)
        finalists = [(c, seconds) for c, seconds in best if self._asked.allows(c) and seconds < least]
        finalists = finalists or [(AS_WRITTEN, self._baseline.seconds)]
        budget, block = self._budget, self._budget.block(self._budget.step)
        steps = self._cost.steps_of(budget.warmup_of(AS_WRITTEN), block)
        steps += 0 if budget.slow else self._cost.steps_of(0, block)
        self.no_time = not self.can_pay(finalists, budget.trial(), steps)
        return not self.no_time

    @property
    def needed(self) -> float:
        """Seconds for a first trial, and for the final rounds of what it may find."""
        finals = FEWEST_ROUNDS * 2 * self._budget.round_of(AS_WRITTEN, self._baseline.seconds)
        return _TO_SPARE * (self._budget.trial() + finals)

    def can_pay(
        self, finalists: Iterable[tuple[Configuration, float]], seconds: float = 0.0, steps: float = 0.0
    ) -> bool:
        """Whether there is time for the fewest final rounds of these, with their seconds per step, and of the baseline.

        And before them for so many `seconds` and `steps` of something else.
        """
        a_round = [(AS_WRITTEN, self._baseline.seconds), *finalists]
        seconds += FEWEST_ROUNDS * sum(self._budget.round_of(*one) for one in a_round)
        steps += FEWEST_ROUNDS * sum(self.steps_of_turn(*one) for one in a_round)
        return self._cost.affords(seconds, steps)

    def steps_of_turn(self, configuration: Configuration, seconds: float) -> int:
        """Steps of the script that a configuration takes in one final round."""
        return self._cost.steps_of(*self._budget.turn(configuration, seconds), configuration.steps_per_update)

    @property
    def kept_for_settings_on_top(self) -> int:
        """Number of trials that `add_on_top` will need."""
        settings, bases = len(self._settings_on_top), 2
        return min(settings * bases, max(1, self._asked.trials // _SHARE_ON_TOP))

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
        if all(trial.configuration != configuration for trial in self.records) and self._has_time():
            self._measured(configuration)

    def _fastest(self, fixed: Configuration, fits: Callable[[Configuration], bool]) -> Configuration:
        """The fastest configuration that fits; `fixed`, if that is not faster than the script as written."""
        found = min((t for t in self.records if t.usable and fits(t.configuration)), key=_seconds_of, default=None)
        gains = found is not None and found.seconds < self._baseline.seconds
        return found.configuration if found is not None and gains else fixed

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
            first = self._cost.block(configuration, budget.warmup_of(configuration), steps)
            limit = best * (_HOPELESS_AT_FIRST if budget.gains(first.median) else _HOPELESS)
            if first.median > limit and (more := budget.until_settled(first.median)):
                steps = budget.block(first.median, at_once)  # they are short: a verdict from a few would be noise
                first = self._cost.block(configuration, more, steps, apply=False)
            hopeless = first.median > limit
            # A 16-bit hook is compared even if it is slow: overflow may be the cause, and the user should learn of it.
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
            second = self._cost.block(configuration, settling, budget.block(first.median, at_once), apply=False)
        except TrialFailed as failure:
            return self._add(configuration, "failed", [], str(failure))
        return self._add(configuration, "measured", [first, second], "", error)

    def _compared(self, configuration: Configuration) -> tuple[GradientError | None, str]:
        """Compare the hook in effect, if that was not done yet. Returns its error, and why it is refused or ""."""
        hook = configuration.hook
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
        record = TrialRecord(len(self.records) + 1, configuration, state, tuple(blocks), why, error, predicted)
        self.records.append(record)
        if record.blocks:
            self.forecast.measured(configuration, record.measured_seconds, predicted)
        spent = self._cost.wall_seconds["trials"] + self._cost.wall_seconds["starts"]
        left = spent / record.number * max(0, self._asked.trials - record.number)
        best = min((t for t in self.records if t.usable), key=lambda t: t.seconds, default=None)
        self._observer.trial(record, self._asked.trials, best, left)
        return record


def _seconds_of(trial: TrialRecord) -> float:
    return trial.seconds


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


def _chosen(settings: Sequence[Setting], row: Setting) -> Setting:
    """The setting that is part of `row`, else the first."""
    return next((s for s in settings if s and s.items() <= row.items()), settings[0])


def _rung_of(setting: Setting) -> Rung:
    return max((BY_NAME[name].rung_of(value) for name, value in setting.items()), key=lambda rung: rung.order)
