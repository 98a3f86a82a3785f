"""A configuration: a value for every knob that differs from the script as written."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from autoddp.errors import did_you_mean, shown
from autoddp.knobs.base import AnyKnob, Reach, Rung, Value
from autoddp.knobs.computing import CUDA_GRAPHS, NUMA_BINDING, OPTIMIZE_DDP, THREADS
from autoddp.knobs.ddp_arguments import (
    BATCHED_GRAD_COPY,
    BROADCAST_BUFFERS,
    BUCKET_CAP_MB,
    BUCKET_CAP_MB_LIST,
    GRADIENT_AS_BUCKET_VIEW,
    STATIC_GRAPH,
)
from autoddp.knobs.env import START_KNOBS
from autoddp.knobs.hook import HOOK, POWERSGD_BATCHED, POWERSGD_FACTORS, POWERSGD_RANK, POWERSGD_START_STEP
from autoddp.knobs.job import PARTED, FirstLook
from autoddp.knobs.micro_batches import ACCUMULATE_STEPS, DEFER_REDUCTIONS

KNOBS: tuple[AnyKnob, ...] = (
    BUCKET_CAP_MB,
    BUCKET_CAP_MB_LIST,
    GRADIENT_AS_BUCKET_VIEW,
    BATCHED_GRAD_COPY,
    STATIC_GRAPH,
    BROADCAST_BUFFERS,
    OPTIMIZE_DDP,
    CUDA_GRAPHS,
    DEFER_REDUCTIONS,
    ACCUMULATE_STEPS,
    HOOK,
    POWERSGD_RANK,
    POWERSGD_BATCHED,
    POWERSGD_FACTORS,
    POWERSGD_START_STEP,
    THREADS,
    NUMA_BINDING,
    *START_KNOBS,
)
"""Every knob, in the order in which recipes show them. To add a knob, declare it in this folder and list it here."""

TRIED_FIRST: tuple[AnyKnob, ...] = (NUMA_BINDING, THREADS, OPTIMIZE_DDP, CUDA_GRAPHS)
"""The knobs of `Phase.FIRST`, in the order in which a study tries them."""

BY_NAME = {knob.name: knob for knob in KNOBS}


def why_left_out(look: FirstLook) -> dict[str, str]:
    """Knob name → why this job cannot have it. Knobs whose option was not given are left out."""
    reasons = {knob.name: _why_not(knob, look) for knob in KNOBS if not knob.option or knob.option in look.options}
    return {name: why for name, why in reasons.items() if why}


def knobs_of(look: FirstLook) -> tuple[str, ...]:
    """Names of the knobs that can be tuned in this job."""
    asked = (knob for knob in KNOBS if not knob.option or knob.option in look.options)
    return tuple(knob.name for knob in asked if not _why_not(knob, look))


def _why_not(knob: AnyKnob, look: FirstLook) -> str:
    if look.untouchable:
        return look.untouchable
    if knob.reach is Reach.DDP and knob.name not in look.available_arguments:
        return f"DDP of torch {look.torch} has no such argument"
    if look.why_unreduced and (knob.reach in (Reach.DDP, Reach.HOOK) or knob.could_part_ranks):
        return look.why_unreduced
    # The job would stop: it compares its ranks under these knobs.
    return knob.why_not(look) or (PARTED if knob.could_part_ranks and look.parted else "")


class Configuration(Mapping[str, Value]):
    """A mapping from knob names to values, immutable and hashable. Absent knobs stay as the script wrote them.

    >>> Configuration({"hook": "bf16", "bucket_cap_mb": 50}).rung.value
    'near'
    >>> str(Configuration({}))
    'as written'

    Raises ValueError, with a text of one line, for an unknown knob, a value that breaks the knob's rule, a knob without
    the one that it needs, or knobs that exclude each other.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        given = dict(values or {})
        for name, value in given.items():
            _check(name, value, given)
        ordered = {knob.name: given[knob.name] for knob in KNOBS if knob.name in given}
        self._values: dict[str, Value] = {k: tuple(v) if isinstance(v, list) else v for k, v in ordered.items()}

    @property
    def rung(self) -> Rung:
        """The highest rung of all values; exact for a configuration without values."""
        return _highest_rung(self._values)

    @property
    def changes(self) -> str:
        """What the configuration changes in training, as text for users.

        >>> Configuration({"hook": "bf16", "broadcast_buffers": False}).changes
        'gradients travel in 16 bits; each rank keeps its own BatchNorm statistics'
        >>> Configuration({"broadcast_buffers": False}).changes
        'each rank keeps its own BatchNorm statistics'
        """
        own = [BY_NAME[name].changes for name in self._values if BY_NAME[name].changes]
        others = {name: value for name, value in self._values.items() if not BY_NAME[name].changes}
        of_rung = _highest_rung(others)
        return "; ".join(own if own and of_rung is Rung.EXACT else [of_rung.changes, *own])

    @property
    def in_words(self) -> list[str]:
        """What each of its values does, in a few words.

        >>> Configuration({"bucket_cap_mb": 8.0, "hook": "bf16"}).in_words
        ['buckets of 8 MiB', 'gradients sent in bf16']
        """
        return [words for name, value in self._values.items() if (words := BY_NAME[name].in_words(value))]

    @property
    def gradient_rung(self) -> Rung:
        """The rung without regard to `accumulate_steps`: how much the gradients themselves are changed."""
        return Configuration(
            {name: value for name, value in self._values.items() if name != ACCUMULATE_STEPS.name}
        ).rung

    @property
    def steps_per_update(self) -> int:
        """Number of the script's steps that become one; 1 as written."""
        return ACCUMULATE_STEPS.of(self._values) or 1

    def allowed_by(self, rung: Rung, accumulate_up_to: int) -> bool:
        """Whether a user who allows `rung`, and up to `accumulate_up_to` steps in one, allows this configuration."""
        return rung.allows(self.gradient_rung) and self.steps_per_update <= accumulate_up_to

    @property
    def hook(self) -> Configuration:
        """The hook and its knobs, but for the start step, which does not change the hook's error; empty without one."""
        return Configuration({n: v for n, v in self._reaching(Reach.HOOK).items() if n != POWERSGD_START_STEP.name})

    @property
    def hook_with_error(self) -> Configuration:
        """The hook and whatever else its error depends on; empty without one.

        Buckets count where each is compressed as one matrix: of a larger one the same rank is a smaller part.
        """
        if not POWERSGD_BATCHED.of(self._values):
            return self.hook
        sizes = (BUCKET_CAP_MB.name, BUCKET_CAP_MB_LIST.name)
        return self.hook.with_values(**{name: self._values[name] for name in sizes if name in self._values})

    @property
    def ddp_arguments(self) -> dict[str, Value]:
        """The arguments for DistributedDataParallel's constructor."""
        return self._reaching(Reach.DDP)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variable → value, for the knobs that have a variable."""
        return {BY_NAME[name].variable: str(value) for name, value in self._values.items() if BY_NAME[name].variable}

    @property
    def start_variables(self) -> dict[str, str]:
        """The part of `variables` that takes effect only in a new process."""
        return {BY_NAME[name].variable: str(value) for name, value in self._reaching(Reach.START).items()}

    @property
    def without_variables(self) -> Configuration:
        """The part that has no environment variables: it can be set only in a running process."""
        return Configuration({name: value for name, value in self._values.items() if not BY_NAME[name].variable})

    def _reaching(self, reach: Reach) -> dict[str, Value]:
        return {name: value for name, value in self._values.items() if BY_NAME[name].reach is reach}

    def with_values(self, **values: Value) -> Configuration:
        """A copy in which these values are set."""
        return Configuration({**self._values, **values})

    def without(self, names: Collection[str]) -> Configuration:
        """Leave these knobs out, and those that need one of them.

        ValueError where a knob that stays cannot do without one of them, as `hook = "powersgd"` without its rank.

        >>> graphs = Configuration({"gradient_as_bucket_view": True, "cuda_graphs": "model", "bucket_cap_mb": 8.0})
        >>> print(graphs.without({"gradient_as_bucket_view"}))
        bucket_cap_mb=8.0
        """
        kept = {name: value for name, value in self._values.items() if name not in names}
        needs = {name: BY_NAME[name].needs for name in kept}
        lost = {name for name, need in needs.items() if need and kept.get(need[0]) != need[1]}
        return self.without({*names, *lost}) if lost else Configuration(kept)

    def plain(self) -> dict[str, Any]:
        """The values as types that JSON and TOML have: tuples become lists."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in self._values.items()}

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))

    def __repr__(self) -> str:
        return f"Configuration({self.plain()})"

    def __str__(self) -> str:
        return " ".join(f"{name}={json.dumps(value)}" for name, value in self.plain().items()) or "as written"


AS_WRITTEN = Configuration()
"""The empty configuration: the script's own settings, which are the baseline."""


def _highest_rung(values: Mapping[str, Value]) -> Rung:
    rungs = (BY_NAME[name].rung_of(value) for name, value in values.items())
    return max(rungs, key=lambda rung: rung.order, default=Rung.EXACT)


def _check(name: str, value: Any, beside: Mapping[str, Any]) -> None:
    knob = BY_NAME.get(name)
    if knob is None:
        raise ValueError(f"unknown knob {name!r}{did_you_mean(name, BY_NAME)}")
    rule = knob.check(value)
    if rule:
        raise ValueError(f"{name} = {shown(value)}: {rule}")
    if knob.needs and beside.get(knob.needs[0]) != knob.needs[1]:
        raise ValueError(f"{name}: needs {knob.needs[0]} = {json.dumps(knob.needs[1])} beside it")
    if knob.excludes in beside:
        raise ValueError(f"{name}: excludes {knob.excludes}, keep one of them")
    missing = next((o.name for o in KNOBS if o.required and o.needs == (name, value) and o.name not in beside), "")
    if missing:
        raise ValueError(f"{name} = {json.dumps(value)}: needs {missing} beside it")
