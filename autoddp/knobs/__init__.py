"""Floor 2. Each knob is one declaration; a configuration is a value for some of them."""

from autoddp.knobs.base import GRADIENT_RUNGS, LIMITS, AnyKnob, Knob, Phase, Reach, Rung, Setting, Value
from autoddp.knobs.configuration import AS_WRITTEN, BY_NAME, KNOBS, TRIED_FIRST, Configuration, knobs_of, why_left_out
from autoddp.knobs.fidelity import GradientError, refused_for_one_parameter, why_refused
from autoddp.knobs.job import FirstLook, JobToTune, ObservedSteps

__all__ = [
    "AS_WRITTEN",
    "BY_NAME",
    "GRADIENT_RUNGS",
    "KNOBS",
    "LIMITS",
    "TRIED_FIRST",
    "AnyKnob",
    "Configuration",
    "FirstLook",
    "GradientError",
    "JobToTune",
    "Knob",
    "ObservedSteps",
    "Phase",
    "Reach",
    "Rung",
    "Setting",
    "Value",
    "knobs_of",
    "refused_for_one_parameter",
    "why_left_out",
    "why_refused",
]
