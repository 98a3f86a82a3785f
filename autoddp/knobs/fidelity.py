"""The error of a communication hook: the difference between its result and the exact mean of the same gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoddp.knobs.base import Rung
from autoddp.units import percent

_STANDS_STILL = 0.999
"""Limit for a single parameter under error feedback. What a step leaves out of it is sent in later steps, so much may
be missing: where gradients are mostly noise, a low rank sends a hundredth of a layer's energy. Above this limit next to
nothing arrives, and the parameter hardly moves."""


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
    worst_of_sum: float = 0.0
    """Relative error of the sum over the steps, of the parameter for which it is the largest."""
    worst_parameter_of_sum: str = ""
    """The name of that parameter; "" if all sums are exact."""


def why_refused(rung: Rung, error: GradientError, limits: Mapping[Rung, float]) -> str:
    """Why a configuration with that error may not be launched; "" if it may.

    The limit of a rung holds for all parameters together, and for each by itself, relative to its own norm: a norm over
    all would hide a small layer that is lost. With error feedback a parameter by itself must only not stand still.
    """
    if not error.finite:
        return "the hook makes NaN or Inf of finite gradients"
    limit = limits.get(rung)
    of = f" of a sum over {error.steps} steps" if rung.has_error_feedback else ""
    whole, worst, name = (
        (error.of_sum, error.worst_of_sum, error.worst_parameter_of_sum)
        if rung.has_error_feedback
        else (error.relative, error.worst, error.worst_parameter)
    )
    if limit is None:
        return ""
    of_one = max(limit, _STANDS_STILL) if rung.has_error_feedback else limit
    for found, where, highest in ((whole, "", limit), (worst, f" in {name or 'one parameter'}", of_one)):
        if found > highest:
            if found == float("inf"):
                return f"the gradients{where} are zero, and the hook makes other numbers of them"
            most, error_of = percent(highest, ".2f"), f"gradient error {percent(found, '.2f')}{of}{where}"
            return f"{error_of}, above the {rung.value} rung's limit of {most}"
    return ""


def refused_for_one_parameter(rung: Rung, error: GradientError, limits: Mapping[Rung, float]) -> bool:
    """Whether the error is above the limit in single parameters alone.

    The gradient of a very small parameter may by chance be next to nothing in one step: it takes several to tell.
    """
    without = replace(error, worst=0.0, worst_of_sum=0.0)
    return bool(why_refused(rung, error, limits)) and not why_refused(rung, without, limits)
