"""A recipe's settings as a form of code can say them: arguments of DDP and torch's own hooks; the rest by hand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from autoddp.knobs import BY_NAME, Configuration, Reach
from autoddp.knobs.base import Value
from autoddp.knobs.computing import CUDA_GRAPHS, NUMA_BINDING, OPTIMIZE_DDP
from autoddp.knobs.ddp_arguments import BUCKET_CAP_MB, BUCKET_CAP_MB_LIST
from autoddp.knobs.hook import (
    DEFAULT_START_STEP,
    HOOK,
    HOOK_BY_NAME,
    POWERSGD_BATCHED,
    POWERSGD_FACTORS,
    POWERSGD_RANK,
    POWERSGD_START_STEP,
    TorchHook,
)
from autoddp.knobs.micro_batches import ACCUMULATE_STEPS, DEFER_REDUCTIONS

EARLIEST_START = 2
"""The first step from which torch's PowerSGD hook compresses: before, DDP has not built its buckets anew."""
_TORCHS_OWN = "torch's own hook"
_EACH_BY_ITSELF = (
    "takes each gradient for a matrix, because batched_powerSGD_hook, which takes a bucket, stops the job with an "
    "AssertionError at its first compressed step (torch 2.13)"
)


@dataclass(frozen=True)
class Hook:
    """One of torch's own hooks, with what its state takes."""

    of_torch: TorchHook
    state: Mapping[str, int] = field(default_factory=dict)
    """Keyword arguments of `PowerSGDState`; empty for a hook without a state."""


@dataclass(frozen=True)
class Said:
    """What a form says of a configuration, and what it leaves to be done by hand."""

    arguments: Mapping[str, Value]
    """Arguments of DistributedDataParallel's constructor."""
    hook: Hook | None
    by_hand: tuple[str, ...]
    """For each setting that is not said as it was measured: the setting, and what to do."""


def said(configuration: Configuration, backend: str, takes: Collection[str], no_hook: str, lacks: str) -> Said:
    """What a form says of the configuration that takes these arguments of DDP.

    `backend` carries the gradients: some of torch's own hooks do not serve gloo. `lacks`: why the form sets no other
    arguments. `no_hook`: why it registers no hook; "" if it does.
    """
    arguments = {name: value for name, value in configuration.ddp_arguments.items() if name in takes}
    by_hand = []
    for name, value in configuration.ddp_arguments.items():
        if name not in takes:
            what = lacks
            if name == BUCKET_CAP_MB_LIST.name and isinstance(value, tuple) and BUCKET_CAP_MB.name in takes:
                arguments[BUCKET_CAP_MB.name] = max(value)
                what += "; in its place all buckets have the size of its largest, and how fast that is was not measured"
            by_hand.append(f"{name} = {_plain(value)}: {what}")
    hook, why = _hook(configuration, backend)
    if hook is not None and no_hook:
        why, hook = no_hook, None
    if why:
        by_hand.append(f"{_hooks_settings(configuration)}: {why}")
    others = (
        f"{name} = {_plain(value)}: {_BY_HAND.get(name, _nothing)(value)}"
        for name, value in configuration.without_variables.items()
        if BY_NAME[name].reach not in (Reach.DDP, Reach.HOOK)
    )
    return Said(arguments, hook, (*by_hand, *others))


def _hook(configuration: Configuration, backend: str) -> tuple[Hook | None, str]:
    """Torch's own hook, and how it differs from what was measured, "" if it does not."""
    name = HOOK.of(configuration)
    if not name:
        return None, ""
    of_torch = HOOK_BY_NAME[name].in_torch
    if of_torch is None:
        return None, "torch has no such hook; launch with the recipe"
    if backend == "gloo" and of_torch.why_not_gloo:
        return (Hook(of_torch.on_gloo) if of_torch.on_gloo else None), of_torch.why_not_gloo
    if HOOK_BY_NAME[name].rank_knob:
        return _low_rank(of_torch, configuration)
    return Hook(of_torch), f"{_TORCHS_OWN} {of_torch.differs}" if of_torch.differs else ""


def _low_rank(of_torch: TorchHook, configuration: Configuration) -> tuple[Hook, str]:
    start = POWERSGD_START_STEP.of(configuration)
    start = DEFAULT_START_STEP if start is None else start  # a recipe need not say it
    state = {
        "matrix_approximation_rank": POWERSGD_RANK.of(configuration) or 1,
        "start_powerSGD_iter": max(start, EARLIEST_START),
        "min_compression_rate": 1,  # as in our hook: whatever factors make smaller; torch's default asks for half
    }
    differs = [_EACH_BY_ITSELF] if POWERSGD_BATCHED.of(configuration) else []
    differs += [f"compresses from step {EARLIEST_START} on at the earliest"] * (start < EARLIEST_START)
    differs += ["sends factors in 32 bits"] * (POWERSGD_FACTORS.of(configuration) is not None)
    return Hook(of_torch, state), f"{_TORCHS_OWN} {'; '.join([*differs, of_torch.differs])}"


def _hooks_settings(configuration: Configuration) -> str:
    return ", ".join(f"{name} = {_plain(value)}" for name, value in configuration.hook.items())


def _nothing(_value: Value) -> str:
    return "nothing in torch's own terms comes near; launch with the recipe"


_BY_HAND: Mapping[str, Callable[[Any], str]] = {
    DEFER_REDUCTIONS.name: lambda passes: (
        f"reduce in the last backward pass of a step alone; around the other {passes - 1}, forward pass included, "
        "write `with model.no_sync():`"
    ),
    ACCUMULATE_STEPS.name: lambda steps: (
        f"{steps} steps become one, a larger batch; divide the loss by {steps}; unscale and clip gradients, step the "
        f"optimizer, update a GradScaler and zero gradients only after each {steps} steps, but step a learning-rate "
        "scheduler after each one; and write the others, forward pass included, within `with model.no_sync():`"
    ),
    OPTIMIZE_DDP.name: lambda cuts: f"before torch.compile, write `torch._dynamo.config.optimize_ddp = {cuts}`",
    CUDA_GRAPHS.name: lambda _what: (
        'nearest is `torch.compile(model, mode="reduce-overhead")` before DDP; how fast that is was not measured'
    ),
    NUMA_BINDING.name: lambda _where: "start with `torchrun --numa-binding node`, from torch 2.9 on and for GPUs",
}
"""Knob → what to do by hand, for knobs that no form of code sets."""


def _plain(value: Value) -> str:
    return str(list(value)) if isinstance(value, tuple) else repr(value)
