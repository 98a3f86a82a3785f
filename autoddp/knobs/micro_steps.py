"""Reductions within a step."""

from __future__ import annotations

from autoddp.knobs.base import Knob, exact, whole_number_between

DEFER_REDUCTIONS = Knob(
    name="defer_reductions",
    says="backward passes of a step, of which only the last one reduces: nothing reads the gradients before it",
    check=whole_number_between(2, 4096),
    rung_of=exact,
    ddp_argument=False,
)
