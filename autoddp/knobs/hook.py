"""Knobs of the communication hook, which decides what is sent instead of full-precision gradients.

A new hook is one entry of `HOOKS` here (with knobs of its own, if it has any), a file of `worker/hooks/` with what it
does, and an entry in the table of `worker/hooks/__init__.py`. What predictions, `autoddp bench` and others have to know
of it is said in its entry; no other file names a hook.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from autoddp.knobs.base import (
    AnyKnob,
    Candidate,
    Knob,
    Reach,
    Rung,
    Value,
    boolean,
    nothing,
    one_of,
    whole_number_between,
)
from autoddp.knobs.job import OWN_HOOK, SPARSE, FirstLook, JobToTune
from autoddp.units import MIB

Size = Literal["whole", "quarter", "tail"]
"""Size of the buckets: one for all gradients, about four, or sizes that shrink towards the end of the backward pass."""

StepModel = Literal["", "16 bits", "low rank"]
"""What a step with a hook is predicted by: each value travels in 16 bits, or low-rank factors do. "" for neither."""
_POWERSGD_RANK = "powersgd_rank"


@dataclass(frozen=True)
class TorchHook:
    """What torch itself has of a hook, for `autoddp recipe code`."""

    function: str
    """Module and name below `torch.distributed.algorithms.ddp_comm_hooks`."""
    in_accelerate: str
    """Member of Accelerate's `DDPCommunicationHookType`."""
    why_not_gloo: str = ""
    """Why it does not serve gloo; "" if it does."""
    on_gloo: TorchHook | None = None
    """What comes nearest to it there; None if nothing does."""
    differs: str = ""
    """What it does otherwise than ours on every backend, after "torch's own hook"; "" if it only rounds otherwise."""


_FP16_OF_TORCH = TorchHook(
    "default_hooks.fp16_compress_hook",
    "FP16",
    differs="does not move gradients into float16's range: those above 65,504 become infinite, and very small ones 0",
)
_ENDS_ON_GLOO = "torch's own PowerSGD hook ends the process on gloo when two buckets travel"


@dataclass(frozen=True)
class CommHook:
    """One value of the knob `hook`."""

    name: str
    rung: Rung
    sends: str
    """What it does with the gradients, in a few words."""
    first_sizes: tuple[Size, ...]
    """The bucket sizes to try with this hook first, the most promising first."""
    share: float | None = None
    """The share of the gradients' bytes that is sent; None if it is so small that the bucket size hardly matters."""
    does: str = ""
    """What it does for people who do not know its name; "" for "gradients sent in NAME"."""
    predicted_as: StepModel = ""
    """The model of a step that holds for it; "" if none does: it is tried without a prediction."""
    rank_knob: str = ""
    """The knob that says the rank of what it sends; "" if that has no rank."""
    timed_ranks: tuple[int, ...] = (0,)
    """Ranks at which `autoddp bench` times it; 0 without one."""
    in_torch: TorchHook | None = None
    """What torch itself has of it; None for nothing."""

    def values(self, rank: int = 0) -> dict[str, Value]:
        """The values of a configuration with this hook, at that rank if it has one."""
        return {"hook": self.name, self.rank_knob: rank} if self.rank_knob else {"hook": self.name}


HOOKS = (
    CommHook(
        "fp16",
        Rung.NEAR,
        "halves the bytes",
        ("quarter", "tail", "whole"),
        share=0.5,
        predicted_as="16 bits",
        in_torch=_FP16_OF_TORCH,
    ),
    CommHook(
        "bf16",
        Rung.NEAR,
        "halves the bytes",
        ("quarter", "tail", "whole"),
        share=0.5,
        predicted_as="16 bits",
        in_torch=TorchHook(
            "default_hooks.bf16_compress_hook",
            "BF16",
            why_not_gloo="torch's own bf16 hook does not take gloo; its fp16 hook sends as many bytes, but gradients "
            "above 65,504 become infinite, and very small ones 0",
            on_gloo=_FP16_OF_TORCH,
        ),
    ),
    CommHook(
        "powersgd",
        Rung.LOSSY,
        "sends low-rank factors",
        ("whole", "quarter"),
        does="gradients sent as low-rank factors",
        predicted_as="low rank",
        rank_knob=_POWERSGD_RANK,
        timed_ranks=(1, 2, 4),
        in_torch=TorchHook(
            "powerSGD_hook.powerSGD_hook",
            "POWER_SGD",
            why_not_gloo=f"{_ENDS_ON_GLOO}; launch with the recipe",
            differs="keeps infinite gradients and NaN for ever, so that after a GradScaler's first overflow nothing is "
            "trained; may make NaN of a matrix whose gradients are all 0; ends the job at a parameter without "
            "dimensions; and waits for the GPU after each bucket, so how fast it is was not measured",
        ),
    ),
)
"""All hooks. Of two on one rung the later is tried first: bf16 before fp16, because it has the range of float32."""

POWERSGD_RANKS = (1, 2, 4, 8)
DEFAULT_START_STEP = 1000  # torch's own default for its PowerSGD hook
_MANY_SHAPES = 8  # matrices of one shape share a product anyway, so batching saves products only if shapes are many
_LARGE_MIB = 100.0  # with smaller gradients the factors cost latency, and halving their bytes gains nothing
HOOK_BY_NAME = {hook.name: hook for hook in HOOKS}


def hooks_on(rung: Rung) -> tuple[CommHook, ...]:
    """The hooks of `rung`."""
    return tuple(hook for hook in HOOKS if hook.rung is rung)


def hook_of(configuration: Mapping[str, Any]) -> CommHook | None:
    """The hook of a configuration; None if it has none."""
    return HOOK_BY_NAME.get(configuration.get("hook", ""))


def hook_predicted_as(model: StepModel) -> CommHook:
    """The hook with which what such hooks compute is measured: of several the last, which is tried first."""
    return [hook for hook in HOOKS if hook.predicted_as == model][-1]


def start_step(job_steps: int | None, steps_per_update: int = 1) -> int:
    """PowerSGD's start step for a job of `job_steps` steps: a tenth of them, or torch's default if they are unknown.

    It is never 0, because DDP rebuilds its buckets after the first reduction.

    The hook counts reductions: where several steps of the script are one, each serves `steps_per_update` of them.

    >>> start_step(90_000), start_step(5), start_step(None)
    (9000, 1, 1000)
    >>> start_step(90_000, steps_per_update=16)
    562
    """
    return DEFAULT_START_STEP if job_steps is None else max(1, job_steps // (10 * steps_per_update))


DIVIDES_BY_THOSE_LEFT = "the script uses join() with divide_by_initial_world_size=False, and hooks divide by all ranks"


def _why_no_hook(look: FirstLook) -> str:
    if look.script_hook:
        return OWN_HOOK
    if any(one.divides_by_those_left for one in look.steps):
        return DIVIDES_BY_THOSE_LEFT
    return SPARSE if look.sparse else ""


def _says() -> str:
    """`"fp16" or "bf16" halves the bytes, "powersgd" sends low-rank factors`."""
    by_what: dict[str, list[str]] = {}
    for hook in HOOKS:
        by_what.setdefault(hook.sends, []).append(f'"{hook.name}"')
    return "what travels: " + ", ".join(f"{' or '.join(names)} {sends}" for sends, names in by_what.items())


HOOK = Knob[str](
    name="hook",
    says=_says(),
    does=lambda name: HOOK_BY_NAME[name].does or f"gradients sent in {name}",
    check=one_of(*HOOK_BY_NAME),
    reach=Reach.HOOK,
    rung=lambda value: HOOK_BY_NAME[value].rung,
    candidates=lambda _job: [hook.name for hook in HOOKS],
    why_not=_why_no_hook,
    could_part_ranks=True,
)


def _of_powersgd(
    name: str,
    says: str,
    does: Callable[[Any], str],
    check: Callable[[Any], str | None],
    candidates: Callable[[JobToTune], Sequence[Candidate]] = nothing,
    required: bool = False,
) -> AnyKnob:
    return AnyKnob(
        name=name,
        says=says,
        does=does,
        check=check,
        reach=Reach.HOOK,
        rung=Rung.LOSSY,
        candidates=candidates,
        why_not=_why_no_hook,
        needs=(HOOK.name, "powersgd"),
        required=required,
        could_part_ranks=True,
    )


POWERSGD_RANK: Knob[int] = _of_powersgd(
    _POWERSGD_RANK,
    "rank of the factors: higher is closer to the exact gradient and slower",
    lambda rank: f"factors of rank {rank}",
    whole_number_between(1, 64),
    lambda _job: POWERSGD_RANKS,
    required=True,
)

POWERSGD_BATCHED: Knob[bool] = _of_powersgd(
    "powersgd_batched",
    "each bucket is compressed as one matrix: fewer products and bytes, further from the exact gradient",
    lambda on: "a whole bucket as one matrix" if on else "",
    boolean,
    lambda job: [True] if job.matrix_shapes >= _MANY_SHAPES else [],
)

POWERSGD_FACTORS: Knob[str] = _of_powersgd(
    "powersgd_factors",
    'type in which the factors travel: "bf16" halves their bytes',
    lambda name: f"factors sent in {name}",
    one_of("bf16"),  # AMP's scaled gradients would overflow float16
    lambda job: ["bf16"] if job.gradient_bytes >= _LARGE_MIB * MIB else [],
)

POWERSGD_START_STEP: Knob[int] = _of_powersgd(
    "powersgd_start_step",
    "reductions done exactly before compression starts: early gradients change too fast for low rank",
    lambda step: f"after {step} exact reductions",
    whole_number_between(0, 10**9),
)
