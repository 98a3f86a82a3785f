"""The configurations worth trying on one rung of one job, and the sampler (Optuna) that chooses the next of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import optuna

from autoddp.knobs import AS_WRITTEN, BY_NAME, KNOBS, AnyKnob, Configuration, Phase, Rung, Setting, Value
from autoddp.knobs.ddp_arguments import BATCHED_GRAD_COPY, BUCKET_CAP_MB, BUCKET_CAP_MB_LIST, GRADIENT_AS_BUCKET_VIEW
from autoddp.knobs.hook import HOOK, Size, hooks_on
from autoddp.knobs.micro_batches import DEFER_REDUCTIONS
from autoddp.wire import JobFacts

_UNGUIDED = 3  # results before TPE uses them; its default of ten random draws would be half of a study of twenty trials
_CANDIDATES = 48  # draws of which TPE takes the best: twice the default, because drawing costs nothing beside a trial
_ASKS = 40  # draws before a configuration that was measured already is accepted again
_NOTHING: Setting = {}
"""A knob left as the script wrote it."""


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
        return complete


class Sampler:
    """Asks Optuna's TPE for configurations of one rung, after the guesses of its space.

    sampler = Sampler(space, seed=0)
    configuration = sampler.ask()
    sampler.tell(0.123)

    The sequence is deterministic for a seed and the results.
    """

    def __init__(self, space: Space, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space = space
        tpe = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_UNGUIDED, n_ei_candidates=_CANDIDATES)
        self._study = optuna.create_study(direction="minimize", sampler=tpe)
        for guess in space.guesses():
            places = {name: space.choices[name].index(setting) for name, setting in guess.items()}
            self._study.enqueue_trial(places, skip_if_exists=True)
        self._pending: optuna.trial.Trial | None = None
        self._told: dict[Configuration, float | None] = {}

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


def _chosen(settings: Sequence[Setting], row: Setting) -> Setting:
    """The setting that is part of `row`, else the first."""
    return next((s for s in settings if s and s.items() <= row.items()), settings[0])


def _rung_of(setting: Setting) -> Rung:
    return max((BY_NAME[name].rung_of(value) for name, value in setting.items()), key=lambda rung: rung.order)
