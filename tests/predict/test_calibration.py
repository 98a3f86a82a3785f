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
from autoddp.predict import Coefficients, Gradient, Profile, Unpredictable, profile_of, step_seconds
from autoddp.predict.calibration import Calibration
from autoddp.predict.step import coefficients_of
from autoddp.timing.arithmetic import HookArithmetic
from autoddp.timing.timeline import Bucket, Span, Timeline
from autoddp.timing.timeline import Gradient as Ready
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
    return profile_of(timelines, SHAPES, "gloo", 2, {"bucket_cap_mb": "5"}, computing)


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
    with pytest.raises(Unpredictable, match="; "):
        profile_of(timelines, SHAPES, "gloo", 2, {}, 0.035)


@pytest.mark.parametrize(("cores", "stretch"), [(1.0, 2.0), (2.0, 0.5), (8.0, Coefficients().stretch)])
def test_threads_of_gloo_and_ranks_share_the_cores(cores: float, stretch: float) -> None:
    """On loopback, at 1 ns per byte; a link of 1 Gbit/s leaves them time."""
    loopback, slow = (LinkModel((Segment(0.0, 2e-4, per_byte),)) for per_byte in (1e-9, 8e-9))
    timelines = [timeline(0), timeline(1)]
    found = profile_of(timelines, SHAPES, "gloo", 1, {}, 0.035, loopback, cores)
    assert found.coefficients.stretch == pytest.approx(stretch)
    between = profile_of(timelines, SHAPES, "gloo", 2, {}, 0.035, slow, cores)
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
    assert found.ready == pytest.approx((0.020, 0.012, 0.004))


# Steps of several backward passes.


def accumulating(passes: list[str], times: float = 1.0) -> Timeline:
    """A step for each text, a pass for each letter: 10 ms of forward, 20 ms of backward; a pass "R" reduces, in 15 ms.

    `times`: how many times as long a pass of this rank takes. The optimizer takes 5 ms.
    """
    spans: list[Span] = []
    gradients: list[Ready] = []
    buckets: list[Bucket] = []
    ends: list[float] = []
    now = 0.0
    for step in passes:
        for letter in step:
            forward, backward = now + 0.010 * times, now + 0.030 * times
            spans += [Span("forward", now, forward), Span("backward", forward, backward)]
            gradients += [Ready(place, forward + at * times) for place, at in enumerate((0.020, 0.012, 0.004))]
            now = backward
            if letter == "R":
                now += 0.015
                spans.append(Span("exposed", backward, now))
                buckets.append(Bucket(0, 4440, backward, now))
        spans.append(Span("optimizer", now, now + 0.005))
        now += 0.005
        ends.append(now)
    sizes = (4000, 400, 40)
    return Timeline(0, "host", 0.0, 0.0, tuple(ends), tuple(spans), tuple(gradients), tuple(buckets), sizes)


def profile_of_one(one: Timeline, **more: Any) -> Profile:
    return profile_of([one, one], SHAPES, "gloo", 2, {}, 0.125, **more)


@pytest.mark.parametrize(("step", "reductions"), [("RRRR", 4), ("-R-R", 2), ("---R", 1)])
def test_the_passes_of_a_step_and_its_reductions(step: str, reductions: int) -> None:
    found = profile_of_one(accumulating([step] * 4))
    assert (found.passes, found.reductions) == (4, reductions)
    assert found.computing == pytest.approx(0.125)
    assert found.fixed == pytest.approx(0.005)
    assert (found.before, found.backward) == pytest.approx((0.010, 0.020))
    assert found.ready == pytest.approx((0.020, 0.012, 0.004))


def test_a_pass_in_which_a_gradient_comes_while_ddp_waits_is_one() -> None:
    """Seen on a busy machine: the stage `exposed` has begun when the last gradient becomes ready."""
    whole = accumulating(["RRRR"] * 4)
    spans = []
    for number, span in enumerate(whole.spans):
        late = span.name == "exposed" and number % 3 == 0
        parts = [Span("exposed", span.begin, span.begin), Span("backward", span.begin, span.begin)] if late else []
        spans += [*parts, span]
    assert len(spans) > len(whole.spans)
    assert profile_of_one(replace(whole, spans=tuple(spans))) == profile_of_one(whole)


def test_the_slower_rank_is_as_late_as_its_passes_since_the_last_reduction() -> None:
    """Without a reduction in between, its delays add up: so all gradients are ready late in the other's last pass."""
    last = {}
    for step in ("RR", "-R"):
        ranks = [accumulating([step] * 3), accumulating([step] * 3, times=1.1)]
        found = profile_of(ranks, SHAPES, "gloo", 2, {}, 0.071)
        last[step] = found.fixed + found.passes * (found.before + found.backward)
        assert found.ready[2] == pytest.approx(0.0044)
    assert last["RR"] == pytest.approx(last["-R"])


def test_the_last_step_of_an_epoch_may_be_shorter() -> None:
    found = profile_of_one(accumulating(["RRRR", "RRRR", "RR", "RRRR", "RRRR", "RRRR"]))
    assert (found.passes, found.reductions) == (4, 4)
    assert found.computing == pytest.approx(0.125)


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        (["RRRR", "RR"] * 3, r"different numbers of backward passes \(2, 4\)"),
        (["R", "RR", "RRR"], r"different numbers of backward passes \(1, 2, 3\)"),
        (["---R", "RRRR"] * 2, r"different numbers of reductions \(1, 4\)"),
    ],
)
def test_steps_that_differ_are_refused(steps: list[str], why: str) -> None:
    with pytest.raises(Unpredictable, match=f"{why}.*; give each step as many micro-batches, and tune again"):
        profile_of_one(accumulating(steps))


def test_a_gradient_that_one_of_the_passes_does_not_give() -> None:
    whole = accumulating(["RR"] * 3)
    with pytest.raises(Unpredictable, match="every gradient exactly once"):
        profile_of_one(replace(whole, gradients=whole.gradients[::2]))


def test_where_no_bucket_was_timed_the_forward_passes_tell() -> None:
    """A script with a hook of its own has no buckets in its timeline."""
    untimed = replace(accumulating(["RRRR"] * 3), buckets=(), no_buckets="sparse")
    assert profile_of_one(untimed, reducing=4.0).reductions == 4
    assert profile_of_one(untimed, reducing=1.0).reductions == 1
    for reducing in (0.0, 2.5, 5.0):
        with pytest.raises(Unpredictable, match=r"4 backward passes, .* not recorded \(sparse\); tune it where"):
            profile_of_one(untimed, reducing=reducing)


def test_a_deferred_reduction_is_predicted_from_the_script_as_written() -> None:
    """Before any trial: four reductions over a link of which only that is known."""
    job = profile(passes=4, reductions=4)
    deferred = Configuration({"defer_reductions": 4})
    as_written, once = (step_seconds(job, one, TRUE) for one in (AS_WRITTEN, deferred))
    assert as_written is not None
    assert once is not None
    assert once < 0.5 * as_written
    assert Calibration(job, as_written).seconds(deferred) == pytest.approx(once, rel=0.1)
