"""When a step reduces: once for all its backward passes, or once for several of the script's steps."""

from __future__ import annotations

from autoddp.knobs.base import Knob, Rung, exact, whole_number_between

_MOST = 4096

DEFER_REDUCTIONS = Knob(
    name="defer_reductions",
    says="backward passes of a step, of which only the last one reduces: nothing reads the gradients before it",
    check=whole_number_between(2, _MOST),
    rung_of=exact,
    ddp_argument=False,
)

ACCUMULATE_STEPS = Knob(
    name="accumulate_steps",
    says="steps of the script that become one, by the mean of their gradients: the batch is so many times as large",
    check=whole_number_between(2, _MOST),
    rung_of=lambda _value: Rung.BATCH,
    ddp_argument=False,
)


def step_counts(most: int) -> tuple[int, ...]:
    """Values worth trying of `accumulate_steps`, the largest first.

    >>> step_counts(12)
    (12, 8, 4, 2)
    >>> step_counts(1)
    ()
    """
    powers = [2**exponent for exponent in range(1, most.bit_length()) if 2**exponent < most]
    return (most, *reversed(powers)) if most > 1 else ()


def larger_batch(steps: int) -> str:
    """What a user must know where so many steps of the script become one; "" for one."""
    if steps == 1:
        return ""
    return (
        f"; {steps} steps of the script become one: the batch is {steps} times as large, the optimizer steps {steps} "
        "times less often, and the learning rate, which stays as it is, is yours to decide"
    )
