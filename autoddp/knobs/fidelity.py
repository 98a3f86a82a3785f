"""The error of a communication hook: the difference between its result and the exact mean of the same gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoddp.knobs.base import Rung
from autoddp.units import percent


@dataclass(frozen=True)
class GradientError:
    """The error of a hook over the steps compared.

    A relative error is the L2 norm of the difference divided by the L2 norm of the exact mean.
    """

    steps: int
    relative: float
    """Relative error over all parameters; the mean of the steps."""
    cosine: float
    """Cosine between the hook's result and the exact mean, over all parameters; the mean of the steps."""
    worst: float
    """The relative error of the worst parameter."""
    worst_parameter: str
    """The name of that parameter in the model; "" if all are exact."""
    of_sum: float
    """Relative error of the sum over the steps: what a hook with error feedback has not sent by their end."""
    finite: bool
    """False if the hook made NaN or Inf of gradients whose exact mean is finite."""


def why_refused(rung: Rung, error: GradientError, limits: Mapping[Rung, float]) -> str:
    """Why a configuration with that error may not be launched; "" if it may."""
    if not error.finite:
        return "the hook makes NaN or Inf of finite gradients"
    limit = limits.get(rung)
    found, what = (
        (error.of_sum, f"of a sum over {error.steps} steps") if rung.has_error_feedback else (error.relative, "")
    )
    if limit is None or found <= limit:
        return ""
    of = f" {what}" if what else ""
    highest = percent(limit, ".2f")
    return f"gradient error {percent(found, '.2f')}{of}, above the {rung.value} rung's limit of {highest}"
