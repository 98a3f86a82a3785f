"""A recipe's settings as a form of code can say them: arguments of DDP and torch's own hooks; the rest by hand."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from autoddp.knobs import Configuration
from autoddp.knobs.base import Value
from autoddp.knobs.computing import CUDA_GRAPHS, NUMA_BINDING, OPTIMIZE_DDP
from autoddp.knobs.ddp_arguments import BUCKET_CAP_MB, BUCKET_CAP_MB_LIST
from autoddp.knobs.hook import (
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


def said(configuration: Configuration, backend: str, takes: Collection[str], takes_hook: bool, form: str) -> Said:
    """What `form` says of the configuration, if it takes these arguments of DDP, and hooks or none.

    `backend` carries the gradients: some of torch's own hooks do not serve gloo.
    """
    arguments = {name: value for name, value in configuration.ddp_arguments.items() if name in takes}
    by_hand = []
    for name, value in configuration.ddp_arguments.items():
        if name not in takes:
            what = f"{form} has no argument for it"
            if name == BUCKET_CAP_MB_LIST.name and isinstance(value, tuple) and BUCKET_CAP_MB.name in takes:
                arguments[BUCKET_CAP_MB.name] = max(value)
                what += "; in its place all buckets have the size of its largest, and how fast that is was not measured"
            by_hand.append(f"{name} = {_plain(value)}: {what}")
    hook, why = _hook(configuration, backend)
    if hook is not None and not takes_hook:
        why, hook = f"{form} registers no hook; model.register_comm_hook(…) does, see --for ddp", None
    if why:
        by_hand.append(f"{_hooks_settings(configuration)}: {why}")
    return Said(arguments, hook, (*by_hand, *_by_hand(configuration)))


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
    return _low_rank(of_torch, configuration) if HOOK_BY_NAME[name].rank_knob else (Hook(of_torch), "")


def _low_rank(of_torch: TorchHook, configuration: Configuration) -> tuple[Hook, str]:
    start = POWERSGD_START_STEP.of(configuration) or 0
    state = {
        "matrix_approximation_rank": POWERSGD_RANK.of(configuration) or 1,
        "start_powerSGD_iter": max(start, EARLIEST_START),
    }
    batched = of_torch.batched if POWERSGD_BATCHED.of(configuration) else None
    differs = [f"compresses from step {EARLIEST_START} on at the earliest"] * (start < EARLIEST_START)
    differs += ["sends factors in 32 bits"] * (POWERSGD_FACTORS.of(configuration) is not None)
    return Hook(batched or of_torch, state), f"torch's own hook {' and '.join(differs)}" if differs else ""


def _hooks_settings(configuration: Configuration) -> str:
    return ", ".join(f"{name} = {_plain(value)}" for name, value in configuration.hook.items())


def _by_hand(configuration: Configuration) -> Iterator[str]:
    """What no form says."""
    passes = DEFER_REDUCTIONS.of(configuration)
    if passes:
        yield (
            f"{DEFER_REDUCTIONS.name} = {passes}: reduce in the last backward pass of a step alone; around the other "
            f"{passes - 1}, forward pass included, write `with model.no_sync():`"
        )
    steps = ACCUMULATE_STEPS.of(configuration)
    if steps:
        yield (
            f"{ACCUMULATE_STEPS.name} = {steps}: {steps} steps become one, a larger batch; divide the loss by {steps}, "
            f"step the optimizer and zero its gradients only after each {steps} steps, and write the others, forward "
            "pass included, within `with model.no_sync():`"
        )
    cuts = OPTIMIZE_DDP.of(configuration)
    if cuts is not None:
        yield f"{OPTIMIZE_DDP.name} = {cuts}: before torch.compile, write `torch._dynamo.config.optimize_ddp = {cuts}`"
    if CUDA_GRAPHS.of(configuration):
        yield (
            f'{CUDA_GRAPHS.name} = "{CUDA_GRAPHS.of(configuration)}": nearest is `torch.compile(model, '
            'mode="reduce-overhead")` before DDP; how fast that is was not measured'
        )
    if NUMA_BINDING.of(configuration):
        yield f"{NUMA_BINDING.name} = node: start with `torchrun --numa-binding node`, from torch 2.9 on and for GPUs"


def _plain(value: Value) -> str:
    return str(list(value)) if isinstance(value, tuple) else repr(value)
