"""The numbers of the model follow what is measured; a profile follows what is recorded."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddp.bench import LinkModel, Segment
from autoddp.codec import convert, decode, encode, replace
from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.predict import Calibration, Coefficients, Gradient, Profile, profile_of, step_seconds
from autoddp.predict.step import coefficients_of
from autoddp.timing.arithmetic import HookArithmetic
from autoddp.timing.timeline import Gradient as Ready
from autoddp.timing.timeline import Span, Timeline
from autoddp.units import MIB

COUNT = 24
TRUE = Coefficients(
    latency=3.0, per_byte=12.0, sharing=1.05, stretch=0.15, copying=4e-10, rounding=9e-10, low_rank=2e-9
)
TRIALS = [
    Configuration(values)
    for values in (
        {"gradient_as_bucket_view": True},
        {"hook": "bf16", "bucket_cap_mb": 8},
        {"hook": "powersgd", "powersgd_rank": 1, "bucket_cap_mb": 32},
        {"bucket_cap_mb": 0.5},
        {"bucket_cap_mb_list": (4, 4, 4, 4, 4, 2, 1, 0.5)},
        {"hook": "fp16", "bucket_cap_mb": 0.5},
        {"hook": "powersgd", "powersgd_rank": 2, "bucket_cap_mb": 8},
        {"hook": "bf16", "bucket_cap_mb": 2, "gradient_as_bucket_view": True},
    )
]


def profile(**more: Any) -> Profile:
    known: dict[str, Any] = {
        "world_size": 2,
        "nodes": 2,
        "backend": "gloo",
        "ddp_arguments": {},
        "gradients": (Gradient((512, 512), MIB),) * COUNT,
        "fixed": 0.002,
        "before": 0.010,
        "backward": 0.020,
        "ready": tuple(0.020 * (COUNT - place) / COUNT for place in range(COUNT)),
        "link": LinkModel((Segment(0.0, 2e-4, 1e-9),)),
    }
    return Profile(**{**known, **more})


def true(configuration: Configuration) -> float:
    found = step_seconds(profile(), configuration, TRUE)
    assert found is not None
    return found


def test_the_script_as_written_tells_the_rate() -> None:
    known = Calibration(profile(), true(AS_WRITTEN))
    assert known.seconds(AS_WRITTEN) == pytest.approx(true(AS_WRITTEN), rel=0.01)
    assert known.profile.coefficients.per_byte == pytest.approx(TRUE.per_byte, rel=0.1)
    assert known.seconds(Configuration({"bucket_cap_mb": 8})) == pytest.approx(
        true(Configuration({"bucket_cap_mb": 8})), rel=0.05
    )


def test_each_trial_makes_the_next_ones_better() -> None:
    known = Calibration(profile(), true(AS_WRITTEN))
    first = [abs(math.log((known.seconds(one) or 1.0) / true(one))) for one in TRIALS]
    for one in TRIALS:
        known.measured(one, true(one))
    last = [abs(math.log((known.seconds(one) or 1.0) / true(one))) for one in TRIALS]
    assert max(first) > 0.15
    assert max(last) < 0.07
    new = Configuration({"hook": "bf16", "bucket_cap_mb": 1})
    assert known.seconds(new) == pytest.approx(true(new), rel=0.06)


def test_one_trial_that_is_far_off_does_not_spoil_the_others() -> None:
    known = Calibration(profile(), true(AS_WRITTEN))
    for one in TRIALS:
        known.measured(one, true(one))
    known.measured(Configuration({"bucket_cap_mb": 4}), 20 * true(AS_WRITTEN))
    assert known.profile.coefficients.per_byte == pytest.approx(TRUE.per_byte, rel=0.3)


def test_what_threads_do_is_learned_from_the_first_trial_with_them() -> None:
    known = Calibration(profile(link=LinkModel((Segment(0.0, 1e-6, 1e-12),))), 0.034)
    before = known.seconds(Configuration({"threads": 4}))
    known.measured(Configuration({"threads": 4}), 0.028)
    after = known.seconds(Configuration({"threads": 4, "bucket_cap_mb": 8}))
    assert before == pytest.approx(0.034, rel=0.05)
    assert after == pytest.approx(0.028, rel=0.05)
    assert known.seconds(Configuration({"bucket_cap_mb": 8})) == pytest.approx(0.034, rel=0.07)


@pytest.mark.parametrize("configuration", [AS_WRITTEN, *TRIALS], ids=str)
def test_a_step_depends_on_no_other_coefficients(configuration: Configuration) -> None:
    """Else the calibration would take a step for unchanged that has changed."""
    for name in {*Coefficients.__struct_fields__} - coefficients_of(configuration) - {"computing"}:
        changed = replace(TRUE, **{name: 2 * getattr(TRUE, name)})
        assert step_seconds(profile(), configuration, changed) == true(configuration), name


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(TRIALS), st.floats(1e-4, 100.0)), max_size=6), st.floats(1e-3, 100.0))
def test_any_measurements_leave_a_model(measured: list[tuple[Configuration, float]], as_written: float) -> None:
    known = Calibration(profile(), as_written)
    for configuration, seconds in measured:
        known.measured(configuration, seconds)
    for one in TRIALS:
        found = known.seconds(one)
        assert found is not None
        assert 0 < found < math.inf
    assert convert(decode(encode(known.profile), dict), Profile) == known.profile


# Timelines, as the workers record them.


def timeline(rank: int, steps: int = 3, late: float = 0.0, twice: bool = False) -> Timeline:
    """10 ms of forward, `late` more, 20 ms of backward in which three gradients become ready, 5 ms exposed, 5 ms of the
    optimizer. Reductions end on all ranks together."""
    spans: list[Span] = []
    gradients: list[Ready] = []
    ends: list[float] = []
    now = 0.0
    for _ in range(steps):
        forward, backward, exposed = now + 0.010 + late, now + 0.030 + late, now + 0.050
        spans += [
            Span("forward", now, forward),
            Span("backward", forward, backward),
            Span("exposed", backward, exposed),
        ]
        gradients += [Ready(place, forward + ready) for place, ready in enumerate((0.020, 0.012, 0.004))]
        gradients += [Ready(2, forward + 0.010)] * twice
        now = exposed + 0.005
        spans.append(Span("optimizer", exposed, now))
        ends.append(now)
    return Timeline(rank, "host", 0.0, 0.0, tuple(ends), tuple(spans), tuple(gradients), (), (4000, 400, 40))


SHAPES = ((100, 10), (100,), (10,))


def of(timelines: list[Timeline], computing: float = 0.035) -> Profile:
    found = profile_of(timelines, SHAPES, "gloo", 2, {"bucket_cap_mb": "5"}, computing)
    assert found is not None
    return found


def test_a_profile_of_equal_ranks() -> None:
    found = of([timeline(0), timeline(1)])
    assert found.fixed == pytest.approx(0.005)
    assert found.before == pytest.approx(0.010)
    assert found.backward == pytest.approx(0.020)
    assert found.ready == pytest.approx((0.020, 0.012, 0.004))
    assert found.order == [2, 1, 0]
    assert found.gradients[0] == Gradient((100, 10), 4000)


def test_a_gradient_is_ready_when_the_last_rank_has_it() -> None:
    found = of([timeline(0), timeline(1, late=0.008)], computing=0.043)
    assert found.computing == pytest.approx(0.043)
    assert found.fixed + found.before + found.ready[2] == pytest.approx(0.005 + 0.018 + 0.004)


def test_it_is_scaled_to_steps_without_reductions() -> None:
    found = of([timeline(0), timeline(1)], computing=0.0175)
    assert found.computing == pytest.approx(0.0175)
    assert found.ready[0] == pytest.approx(0.010)


@pytest.mark.parametrize(
    "timelines",
    [
        [],
        [timeline(0, steps=0)],
        [timeline(0), timeline(1, steps=0)],
        [timeline(0, twice=True)],
        [replace(timeline(0), gradients=timeline(0).gradients[:2])],
        [replace(timeline(0), parameter_bytes=(1, 2))],
        [replace(timeline(0), spans=())],
    ],
)
def test_records_that_do_not_tell_enough(timelines: list[Timeline]) -> None:
    assert profile_of(timelines, SHAPES, "gloo", 2, {}, 0.035) is None


@pytest.mark.parametrize(("cores", "stretch"), [(1.0, 2.0), (2.0, 0.5), (8.0, Coefficients().stretch)])
def test_threads_of_gloo_and_ranks_share_the_cores(cores: float, stretch: float) -> None:
    """On loopback, at 1 ns per byte; a link of 1 Gbit/s leaves them time."""
    loopback, slow = (LinkModel((Segment(0.0, 2e-4, per_byte),)) for per_byte in (1e-9, 8e-9))
    timelines = [timeline(0), timeline(1)]
    found = profile_of(timelines, SHAPES, "gloo", 1, {}, 0.035, loopback, cores)
    assert found is not None
    assert found.coefficients.stretch == pytest.approx(stretch)
    between = profile_of(timelines, SHAPES, "gloo", 2, {}, 0.035, slow, cores)
    assert between is not None
    assert between.coefficients.stretch <= max(0.25, Coefficients().stretch)


def test_what_hooks_compute_is_that_of_the_slowest_rank() -> None:
    slow = HookArithmetic(
        copying=2e-10, rounding=5e-10, low_rank=1e-9, further_rank=2e-10, call=5e-5, shape=2e-5, further_row=4e-5
    )
    fast = HookArithmetic(
        copying=1e-10, rounding=6e-10, low_rank=9e-10, further_rank=1e-10, call=4e-5, shape=1e-5, further_row=3e-5
    )
    ranks = [replace(timeline(number), arithmetic=one) for number, one in enumerate((slow, fast))]
    found = of(ranks)
    assert found.hooks_are_measured
    for name, seconds in (
        ("copying", 2e-10),
        ("rounding", 6e-10),
        ("low_rank", 1e-9),
        ("further_rank", 2e-10),
        ("call", 5e-5),
        ("shape", 2e-5),
        ("further_row", 4e-5),
    ):
        assert seconds <= getattr(found.coefficients, name) < 1.5 * seconds
    assert not of([timeline(0), timeline(1)]).hooks_are_measured


def test_a_measured_hook_is_predicted_well_at_once() -> None:
    """The first trial with PowerSGD, of which there is nothing but what was measured of its arithmetic."""
    hook = Configuration({"hook": "powersgd", "powersgd_rank": 1, "bucket_cap_mb": 32})
    guessed = Calibration(profile(), true(AS_WRITTEN)).seconds(hook)
    measured = replace(Coefficients(), low_rank=TRUE.low_rank, rounding=TRUE.rounding, copying=TRUE.copying)
    known = Calibration(profile(hooks_are_measured=True, coefficients=measured), true(AS_WRITTEN)).seconds(hook)
    assert guessed is not None
    assert abs(guessed / true(hook) - 1) > 0.2
    assert known == pytest.approx(true(hook), rel=0.1)


def test_a_step_in_which_a_gradient_is_missing_is_left_out() -> None:
    whole = timeline(0)
    found = profile_of([replace(whole, gradients=whole.gradients[1:])], SHAPES, "gloo", 1, {}, 0.035)
    assert found is not None
    assert found.ready == pytest.approx((0.020, 0.012, 0.004))
