"""The configurations of one rung that a job can have, and the few that are tried first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoddp.knobs import AS_WRITTEN, BY_NAME, KNOBS, AnyKnob, Configuration, Phase, Rung, Setting, Value
from autoddp.knobs.ddp_arguments import (
    BATCHED_GRAD_COPY,
    BUCKET_CAP_MB,
    BUCKET_CAP_MB_LIST,
    GRADIENT_AS_BUCKET_VIEW,
    STATIC_GRAPH,
)
from autoddp.knobs.hook import HOOK, Size, hooks_on
from autoddp.knobs.micro_batches import DEFER_REDUCTIONS
from autoddp.wire import JobFacts

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

    @property
    def hooks(self) -> frozenset[str]:
        """Names of the hooks of this rung; empty on the exact rung."""
        return frozenset(str(hook[HOOK.name]) for hook in self._hooks if HOOK.name in self.facts.knobs)

    def settings_of(self, configuration: Configuration) -> dict[str, Setting]:
        """The setting of each dimension of which a configuration of this space consists."""
        return {name: _chosen(settings, configuration) for name, settings in self.choices.items()}

    def around(self, configuration: Configuration) -> Iterator[Configuration]:
        """The configurations of this space that differ from this one in one dimension."""
        at = self.settings_of(configuration)
        for name, settings in self.choices.items():
            for setting in settings:
                yield self.configuration({**at, name: setting})

    def configuration(self, settings: Mapping[str, Setting]) -> Configuration:
        """The configuration that consists of one setting for each dimension."""
        values = dict(self.fixed)
        if len(self._hooks) == 1:
            values |= self._hooks[0]
        for setting in settings.values():
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
        """Whether the script has find_unused_parameters, which a static graph makes needless.

        Without that search DDP also sorts its buckets by when gradients come.
        """
        return STATIC_GRAPH.name in self.choices and self.facts.find_unused_parameters


def _chosen(settings: Sequence[Setting], row: Mapping[str, Value]) -> Setting:
    """The setting that is part of `row`, else the first."""
    return next((s for s in settings if s and s.items() <= row.items()), settings[0])


def _rung_of(setting: Setting) -> Rung:
    return max((BY_NAME[name].rung_of(value) for name, value in setting.items()), key=lambda rung: rung.order)
