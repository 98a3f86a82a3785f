"""How far what a hook makes of the gradients is from the exact mean of the same gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoddp.knobs.base import Rung


@dataclass(frozen=True)
class GradientError:
    """Norms are L2, over all steps compared; a relative error is the difference's norm over the exact mean's."""

    steps: int
    relative: float
    """Over all parameters; the mean of the steps."""
    cosine: float
    """Between the two, over all parameters; the mean of the steps."""
    worst: float
    """The relative error of the worst parameter."""
    worst_parameter: str
    """Its name in the model; "" if all are exact."""
    of_sum: float
    """Relative error of the sum over the steps: what an error-feedback hook has not paid back by then."""
    finite: bool
    """False: the hook made NaN or Inf of gradients whose exact mean is finite."""


LIMITS: Mapping[Rung, float] = {Rung.NEAR: 0.02, Rung.LOSSY: 0.95}
"""The largest gradient error of a rung; above it a configuration is refused. The user may set others.

near, of one step: rounding to bfloat16 errs by 0.2 to 0.5 %, to float16 by a tenth of that. Four times bfloat16's own
error means that values have left the format's range: gradients so small that float16 makes zeros of them.

lossy, of the sum over the steps compared: one step says little, because what it leaves out is sent by later ones, on
top of their own. What counts is whether it arrives: at 0.95 a tenth of the sum's energy has (1 - 0.95²), and the
optimizer steps by gradients of another time.
"""


def why_refused(rung: Rung, error: GradientError, limits: Mapping[Rung, float]) -> str:
    """Why a configuration with that error may not be launched; "" if it may."""
    if not error.finite:
        return "the hook makes NaN or Inf of finite gradients"
    limit = limits.get(rung)
    found, what = (error.of_sum, f"of a sum over {error.steps} steps") if rung is Rung.LOSSY else (error.relative, "")
    if limit is None or found <= limit:
        return ""
    of = f" {what}" if what else ""
    return f"gradient error {found:.2%}{of}, above the {rung.value} rung's limit of {limit:.2%}"
