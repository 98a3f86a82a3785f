"""A rung's limit of the gradient error: for all parameters together, and for each by itself."""

from __future__ import annotations

import math
from dataclasses import replace

from autoddp.knobs import LIMITS, GradientError, Rung, refused_for_one_parameter, why_refused

GOOD = GradientError(4, 0.002, 1.0, 0.004, "head.bias", 0.4, True, 0.5, "stem.weight")


def test_a_good_hook_is_not_refused() -> None:
    assert [why_refused(rung, GOOD, LIMITS) for rung in (Rung.NEAR, Rung.LOSSY)] == ["", ""]


def test_one_parameter_that_is_lost_is_named() -> None:
    near, lossy = replace(GOOD, worst=1.0), replace(GOOD, worst_of_sum=0.9995)
    says = "gradient error 100.00 % in head.bias, above the near rung's limit of 2.00 %"
    assert why_refused(Rung.NEAR, near, LIMITS) == says
    says = "gradient error 99.95 % of a sum over 4 steps in stem.weight, above the lossy rung's limit of 99.90 %"
    assert why_refused(Rung.LOSSY, lossy, LIMITS) == says
    # What is sent later has not stopped: PowerSGD of rank 1 on a layer of 1024 x 1024 whose inputs are noise.
    assert why_refused(Rung.LOSSY, replace(GOOD, worst_of_sum=0.9954), LIMITS) == ""
    # What error feedback has not sent yet is no loss, and of a step there is no sum.
    assert why_refused(Rung.LOSSY, near, LIMITS) == why_refused(Rung.NEAR, lossy, LIMITS) == ""


def test_gradients_that_should_be_zero() -> None:
    why = why_refused(Rung.NEAR, replace(GOOD, worst=math.inf), LIMITS)
    assert why == "the gradients in head.bias are zero, and the hook makes other numbers of them"


def test_one_parameter_alone_is_told_from_all() -> None:
    assert refused_for_one_parameter(Rung.NEAR, replace(GOOD, worst=0.5), LIMITS)
    assert not refused_for_one_parameter(Rung.NEAR, replace(GOOD, worst=0.5, relative=0.3), LIMITS)
    assert not refused_for_one_parameter(Rung.NEAR, replace(GOOD, worst=0.5, finite=False), LIMITS)
    assert not refused_for_one_parameter(Rung.NEAR, GOOD, LIMITS)
