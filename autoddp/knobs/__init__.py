"""Floor 1. Each knob is one declaration; a configuration is a value for some of them."""

from autoddp.knobs.base import GRADIENT_RUNGS, Knob, Rung, Value
from autoddp.knobs.configuration import AS_WRITTEN, BY_NAME, KNOBS, Configuration
from autoddp.knobs.fidelity import LIMITS, GradientError, why_refused

__all__ = [
    "AS_WRITTEN",
    "BY_NAME",
    "GRADIENT_RUNGS",
    "KNOBS",
    "LIMITS",
    "Configuration",
    "GradientError",
    "Knob",
    "Rung",
    "Value",
    "why_refused",
]
