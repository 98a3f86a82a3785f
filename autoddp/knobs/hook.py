"""What travels instead of full-precision gradients."""

from __future__ import annotations

from typing import Any

from autoddp.knobs.base import Knob, Rung, boolean, one_of, whole_number_between

POWERSGD_RANKS = (1, 2, 4, 8)


def _rung(value: Any) -> Rung:
    return Rung.LOSSY if value == "powersgd" else Rung.NEAR


def _lossy(_value: Any) -> Rung:
    return Rung.LOSSY


HOOK = Knob(
    name="hook",
    says='what travels: "fp16" or "bf16" halves the bytes, "powersgd" sends low-rank factors',
    check=one_of("fp16", "bf16", "powersgd"),
    rung_of=_rung,
    ddp_argument=False,
)

POWERSGD_RANK = Knob(
    name="powersgd_rank",
    says="rank of the factors: higher is closer to the exact gradient and slower",
    check=whole_number_between(1, 64),
    rung_of=_lossy,
    ddp_argument=False,
    needs=("hook", "powersgd"),
)

POWERSGD_BATCHED = Knob(
    name="powersgd_batched",
    says="each bucket is compressed as one matrix: fewer products and bytes, further from the exact gradient",
    check=boolean,
    rung_of=_lossy,
    ddp_argument=False,
    needs=("hook", "powersgd"),
)

POWERSGD_FACTORS = Knob(
    name="powersgd_factors",
    says='type in which the factors travel: "bf16" halves their bytes',
    check=one_of("bf16"),  # AMP's scaled gradients would overflow float16
    rung_of=_lossy,
    ddp_argument=False,
    needs=("hook", "powersgd"),
)

POWERSGD_START_STEP = Knob(
    name="powersgd_start_step",
    says="reductions done exactly before compression starts: early gradients change too fast for low rank",
    check=whole_number_between(0, 10**9),
    rung_of=_lossy,
    ddp_argument=False,
    needs=("hook", "powersgd"),
)

DEFAULT_START_STEP = 1000  # torch's own default for its PowerSGD hook


def start_step(job_steps: int | None) -> int:
    """Of a job that long: a tenth of it. Never 0, since DDP rebuilds its buckets after the first.

    >>> start_step(90_000), start_step(5), start_step(None)
    (9000, 1, 1000)
    """
    return DEFAULT_START_STEP if job_steps is None else max(1, job_steps // 10)
