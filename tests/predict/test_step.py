"""The model of a step against schedules worked out by hand, and against what must hold for any job."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autoddp.bench import LinkModel, Segment
from autoddp.codec import replace
from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.predict import Coefficients, Gradient, Profile, step_seconds, what_if
from autoddp.predict.elsewhere import Elsewhere, moved
from autoddp.predict.network import Link, Network
from autoddp.predict.step import low_rank_bytes
from autoddp.units import MIB

PLAIN = Coefficients(
    burst=0.0,
    stretch=1e-12,
    copying=0.0,
    rounding=0.0,
    low_rank=0.0,
    further_rank=0.0,
    call=0.0,
    shape=0.0,
    further_row=0.0,
    wake=0.0,
    crowding=0.0,
)
"""Nothing but the link costs anything."""


def profile(
    sizes: list[float],
    ready: list[float],
    latency: float = 0.0,
    per_mib: float = 0.01,
    backend: str = "nccl",
    **more: Any,
) -> Profile:
    """Gradients of `sizes` MiB; 10 ms before a backward pass that ends with the last gradient."""
    return Profile(
        world_size=2,
        nodes=2,
        backend=backend,
        ddp_arguments=more.pop("ddp_arguments", {}),
        gradients=tuple(Gradient((round(size * MIB) // 4,), round(size * MIB) // 4 * 4) for size in sizes),
        fixed=0.004,
        before=0.006,
        backward=max(ready),
        ready=tuple(ready),
        link=LinkModel((Segment(0.0, latency, per_mib / MIB),)),
        coefficients=more.pop("coefficients", PLAIN),
        **more,
    )


def seconds(job: Profile, **values: Any) -> float:
    found = step_seconds(job, Configuration(values))
    assert found is not None
    return found


# Three gradients of 2 MiB, 20 ms of the link each, ready after 10, 20 and 30 ms of the backward pass.
THREE = profile([2, 2, 2], [0.030, 0.020, 0.010])


def test_one_bucket_after_another() -> None:
    # ready at 20, 30, 40 ms; the link is busy from 20 to 40, 40 to 60, 60 to 80
    assert seconds(THREE, bucket_cap_mb=2) == pytest.approx(0.080)


def test_one_bucket_of_all() -> None:
    assert seconds(THREE, bucket_cap_mb=6) == pytest.approx(0.010 + 0.030 + 0.060)


def test_as_written_the_first_bucket_is_small() -> None:
    # one gradient reaches 1 MiB: 20 to 40 ms; the other two are ready at 40: 40 to 80
    assert seconds(THREE) == pytest.approx(0.080)


def test_a_link_that_is_fast_leaves_the_last_bucket() -> None:
    quick = profile([2, 2, 2], [0.030, 0.020, 0.010], per_mib=0.001)
    assert seconds(quick, bucket_cap_mb=2) == pytest.approx(0.040 + 0.002)


def test_latency_is_paid_for_each_bucket() -> None:
    late = profile([2, 2, 2], [0.030, 0.020, 0.010], latency=0.005)
    assert seconds(late, bucket_cap_mb=2) == pytest.approx(0.020 + 3 * 0.025)


def test_gloo_moves_two_at_once() -> None:
    """Their latencies pass at the same time, their bytes share the link."""
    late = profile([2, 2], [0.010, 0.010], latency=0.005, backend="gloo")
    assert seconds(late, bucket_cap_mb=2) == pytest.approx(0.020 + 0.005 + 0.040)


def test_a_link_that_has_been_idle_catches_up() -> None:
    saves = replace(THREE, coefficients=replace(PLAIN, burst=1 * MIB))
    # Of each 20 ms, 10 are saved up in the idle 20 ms before the first bucket, and none between buckets that follow
    # each other: busy from 20 to 30, 30 to 50, 50 to 70.
    assert seconds(saves, bucket_cap_mb=2) == pytest.approx(0.070)
    assert seconds(saves, bucket_cap_mb=6) == pytest.approx(0.040 + 0.060 - 0.010)
    # No more is saved up than the link could have carried meanwhile.
    saves = replace(THREE, coefficients=replace(PLAIN, burst=100 * MIB))
    assert seconds(saves, bucket_cap_mb=6) == pytest.approx(0.040 + 0.060 - 0.040)


def test_a_nominal_rate_is_that_of_a_link_that_saves_nothing_up() -> None:
    job = replace(THREE, coefficients=replace(PLAIN, burst=1 * MIB))
    assert moved(job, Elsewhere(nodes=4))[0].coefficients.burst == 1 * MIB
    assert moved(job, Elsewhere(rate=1e9))[0].coefficients.burst == 0


def test_computing_that_was_measured_too_slow() -> None:
    job = replace(THREE, coefficients=replace(PLAIN, pace=0.5))
    assert job.computing == pytest.approx(0.020)
    assert seconds(job, bucket_cap_mb=6) == pytest.approx(0.020 + 0.060)
    assert seconds(job, bucket_cap_mb=6, accumulate_steps=4) == pytest.approx((0.080 + 3 * 0.020) / 4)


def test_half_the_bytes() -> None:
    assert seconds(THREE, bucket_cap_mb=6, hook="bf16") == pytest.approx(0.040 + 0.030)


def test_a_16_bit_hook_delays_the_backward_pass_on_a_cpu() -> None:
    # 1 s per GiB: 2 MiB take 1.953 ms to convert, each way. The way back of the last bucket is exposed too.
    slow = replace(THREE, backend="gloo", coefficients=replace(PLAIN, rounding=1 / 2**30))
    there = 2 / 1024
    # launched at 20 + t, 30 + 2t, 40 + 3t; 10 ms of the link each, so the link is free again in time
    assert seconds(slow, bucket_cap_mb=2, hook="bf16") == pytest.approx(0.040 + 3 * there + 0.010 + there)


def test_factors_of_low_rank() -> None:
    gradient = Gradient((1024, 512), 1024 * 512 * 4)
    assert low_rank_bytes([gradient], rank=4) == (1024 * 4 * 4, 512 * 4 * 4)
    assert low_rank_bytes([gradient], rank=4, width=2) == (1024 * 4 * 2, 512 * 4 * 2)
    assert low_rank_bytes([gradient, Gradient((1000,), 4000)], rank=1) == (1024 * 4 + 4000, 512 * 4)
    assert low_rank_bytes([Gradient((4, 4), 64)], rank=2) == (64, 0)  # factors would not be smaller
    assert low_rank_bytes([Gradient((64, 8, 4, 2), 16384)], rank=1) == (256, 256)  # a convolution, as 64 × 64
    assert low_rank_bytes([Gradient((10001,), 40004)], rank=1, batched=True) == (400 + 4, 400)


def test_low_rank_with_one_bucket() -> None:
    """Two reductions after the backward pass, one after the other."""
    job = profile([4], [0.020], latency=0.003, per_mib=1024.0, backend="gloo")  # 1 ms per KiB
    job = replace(job, gradients=(Gradient((1024, 1024), 4 * MIB),))
    assert seconds(job, hook="powersgd", powersgd_rank=1) == pytest.approx(0.030 + 2 * (0.003 + 4.0))


def test_low_rank_computes_for_each_bucket_shape_and_rank() -> None:
    job = profile([4], [0.020], per_mib=0.0, backend="gloo")
    shapes = ((1024, 512), (1024, 512), (512, 1024))
    costs = replace(PLAIN, call=0.001, shape=0.0001, further_row=0.00002)
    job = replace(job, gradients=tuple(Gradient(one, 2 * MIB) for one in shapes), ready=(0.020,) * 3)
    found = seconds(replace(job, coefficients=costs), hook="powersgd", powersgd_rank=3, bucket_cap_mb=8)
    assert found == pytest.approx(0.030 + 2 * (0.001 + 2 * (0.0001 + 2 * 0.00002)))


def test_low_rank_on_busy_cores_costs_more_for_each_further_bucket() -> None:
    job = profile([4, 4, 4], [0.020, 0.020, 0.020], backend="gloo")
    job = replace(job, gradients=(Gradient((1024, 1024), 4 * MIB),) * 3)
    busy = replace(job, coefficients=replace(PLAIN, crowding=0.002))
    one, three = ({"hook": "powersgd", "powersgd_rank": 1, "bucket_cap_mb": cap} for cap in (12, 4))
    assert seconds(busy, **one) == seconds(job, **one)
    # what travels meanwhile is waited for less
    assert seconds(busy, **three) - seconds(job, **three) == pytest.approx(2 * 0.002, rel=0.05)


def test_copies_that_the_view_saves() -> None:
    job = replace(THREE, backend="gloo", coefficients=replace(PLAIN, copying=1 / 2**30))
    once = 6 / 1024 / 2  # half of the copies of 6 MiB, before the reduction; the other half after it
    assert seconds(job, bucket_cap_mb=6) == pytest.approx(0.100 + 2 * once)
    assert seconds(job, bucket_cap_mb=6, gradient_as_bucket_view=True) == pytest.approx(0.100)
    script = replace(job, ddp_arguments={"gradient_as_bucket_view": "True"})
    assert seconds(script, bucket_cap_mb=6) == pytest.approx(0.100)


def test_computing_is_slower_beside_a_reduction() -> None:
    job = replace(THREE, coefficients=replace(PLAIN, stretch=1.0))
    # 20 ms: the first bucket travels until 40, meanwhile 10 ms of computing take 20; so all are ready at 40 + …
    # the second is launched at 40 and travels until 60, the third gradient is ready at 60: 60 to 80
    assert seconds(job, bucket_cap_mb=2) == pytest.approx(0.080)
    # without overlap nothing is slower
    assert seconds(job, bucket_cap_mb=6) == pytest.approx(0.100)


def test_several_steps_as_one() -> None:
    alone = 0.040
    assert seconds(THREE, accumulate_steps=4) == pytest.approx((seconds(THREE) + 3 * alone) / 4)


# The same in each of three backward passes of a step: 6 ms before it, 30 ms of backward; 4 ms are those of the step.
EACH = replace(THREE, passes=3, reductions=3)
ALONE = 0.004 + 3 * 0.036


def test_each_backward_pass_of_a_step_reduces() -> None:
    """A pass takes 80 ms, 4 ms of which are those of the step alone."""
    assert seconds(EACH, bucket_cap_mb=2) == pytest.approx(0.004 + 3 * 0.076)
    assert seconds(EACH, bucket_cap_mb=6) == pytest.approx(0.004 + 3 * (0.036 + 0.060))
    assert EACH.computing == pytest.approx(ALONE)


def test_deferred_only_the_last_pass_reduces() -> None:
    """Two passes of 36 ms and the last one with its reductions: as the script would take with no_sync."""
    assert seconds(EACH, bucket_cap_mb=6, defer_reductions=3) == pytest.approx(ALONE + 0.060)
    no_sync = replace(EACH, reductions=1)
    for values in ({"bucket_cap_mb": 2}, {"bucket_cap_mb": 6}, {"hook": "bf16"}):
        assert seconds(no_sync, **values) == pytest.approx(seconds(EACH, **values, defer_reductions=3))


def test_several_steps_of_several_passes_as_one() -> None:
    """Nothing reduces in the steps that are kept; the last one reduces as it is written."""
    assert seconds(EACH, accumulate_steps=4) == pytest.approx((seconds(EACH) + 3 * ALONE) / 4)


def test_a_larger_batch_makes_each_pass_longer() -> None:
    larger, _ = moved(EACH, Elsewhere(batch_times=2.0))
    assert larger.computing == pytest.approx(0.004 + 2 * 3 * 0.036)


@pytest.mark.parametrize("passes", [2, 4, 6])
def test_reductions_that_are_deferred_over_another_number_of_passes(passes: int) -> None:
    """The last ones come where the optimizer reads the gradients, which the model does not know."""
    assert step_seconds(EACH, Configuration({"defer_reductions": passes})) is None
    assert step_seconds(replace(EACH, reductions=1), Configuration({"defer_reductions": passes})) is None


def test_buffers_are_broadcast_once_for_each_reduction_as_written() -> None:
    """Where reductions are deferred too: each broadcast of 1 MiB takes a latency of 1 ms, and 10 ms of the link."""
    job = profile([2, 2, 2], [0.030, 0.020, 0.010], latency=0.001, passes=3, reductions=3)
    with_buffers = replace(job, buffer_bytes=MIB)
    for values in ({}, {"defer_reductions": 3}):
        assert seconds(with_buffers, **values) == pytest.approx(seconds(job, **values) + 3 * 0.011)
    once = replace(job, reductions=1)
    assert seconds(replace(once, buffer_bytes=MIB)) == pytest.approx(seconds(once) + 0.011)


def test_what_the_model_does_not_know() -> None:
    assert step_seconds(THREE, Configuration({"interfaces": "eth0,eth1"})) is None


def test_an_order_of_collectives_that_waits() -> None:
    network = Network(Link(0.001, lambda size: size), at_once=1)
    first, second = network.launch(1.0, 2.0), network.launch(1.5, 1.0)
    assert network.until_done(second) == pytest.approx(4.002)
    assert network.until_done(first) == pytest.approx(3.001)
    assert not network.busy


def test_what_if() -> None:
    """Twice the nodes send 1.5 times the bytes, a link twice as fast needs half the time for them."""
    found = {one["label"]: one["step_ms"] for one in what_if(THREE, Configuration({"bucket_cap_mb": 6}))}
    assert found == pytest.approx(
        {
            "a batch twice as large": 4 + 12 + 60 + 60,
            "a link twice as fast": 40 + 30,
            "4 nodes": 40 + 90,
            "8 nodes": 40 + 105,
        }
    )


JOBS = st.builds(
    lambda gradients, latency, per_mib, backend, passes, reductions: profile(
        [size for size, _ in gradients],
        [at for _, at in gradients],
        latency,
        per_mib,
        backend,
        passes=passes,
        reductions=min(passes, reductions),
    ),
    st.lists(st.tuples(st.floats(0.01, 30), st.floats(0.0001, 0.2)), min_size=1, max_size=20),
    st.floats(0, 0.01),
    st.floats(1e-5, 0.1),
    st.sampled_from(["gloo", "nccl"]),
    st.integers(1, 8),
    st.integers(1, 8),
)
CONFIGURATIONS = st.sampled_from(
    [
        AS_WRITTEN,
        Configuration({"bucket_cap_mb": 2}),
        Configuration({"bucket_cap_mb_list": (8, 4, 1)}),
        Configuration({"hook": "fp16", "bucket_cap_mb": 4}),
        Configuration({"hook": "powersgd", "powersgd_rank": 2, "bucket_cap_mb": 4}),
        Configuration({"gradient_as_bucket_view": True}),
    ]
)
COEFFICIENTS = st.builds(
    Coefficients,
    pace=st.floats(0.5, 2.0),
    burst=st.floats(0, 1e7),
    stretch=st.floats(1e-9, 1.0),
    copying=st.floats(0, 1e-9),
    rounding=st.floats(0, 1e-9),
    low_rank=st.floats(0, 1e-9),
    sharing=st.floats(1.0, 1.3),
)


@given(JOBS, CONFIGURATIONS, COEFFICIENTS)
def test_a_step_takes_as_long_as_computing_and_as_the_link(
    job: Profile, configuration: Configuration, of: Coefficients
) -> None:
    found = step_seconds(job, configuration, of)
    assert found is not None
    assert math.isfinite(found)
    assert found >= replace(job, coefficients=of).computing * (1 - 1e-9)
    if not configuration.hook:
        per_byte = job.link.segments[0].seconds_per_byte
        assert found >= (job.gradient_bytes - of.burst) * per_byte * (1 - 1e-6) - 1e-9


@given(JOBS, CONFIGURATIONS, st.floats(1.0, 10.0), st.floats(0, 1e7))
def test_more_bandwidth_is_never_slower(job: Profile, configuration: Configuration, times: float, burst: float) -> None:
    slower = replace(PLAIN, burst=burst)
    slow, fast = (step_seconds(job, configuration, of) for of in (slower, replace(slower, per_byte=1 / times)))
    assert slow is not None
    assert fast is not None
    assert fast <= slow * (1 + 1e-9)


ANOMALY = profile(
    [1.0, 2.0, 2.75, 2.75, 9.75, 18.75, 29.5, 29.75],
    [0.125, 0.125, 0.125, 0.0546875, 0.125, 0.125, 0.125, 0.0234375],
    0.009765625,
    0.03125,
    "gloo",
)


@given(JOBS, CONFIGURATIONS, st.floats(1.0, 10.0))
@example(ANOMALY, Configuration({"bucket_cap_mb": 2}), 1.25)
def test_less_latency_is_never_slower(job: Profile, configuration: Configuration, times: float) -> None:
    """Of gloo at most by its latencies: of two buckets at once both may stand in theirs, and then nothing moves."""
    slow, fast = (step_seconds(job, configuration, of) for of in (PLAIN, replace(PLAIN, latency=1 / times)))
    assert slow is not None
    assert fast is not None
    at_most = 3 * job.reductions * len(job.gradients)  # reductions of a step: PowerSGD makes several of a bucket
    latencies = at_most * job.link.segments[0].alpha_seconds / times
    assert fast <= (slow + latencies * (job.backend == "gloo")) * (1 + 1e-9)


@given(JOBS, st.floats(1.0, 10.0))
def test_slower_computing_is_never_faster(job: Profile, times: float) -> None:
    slower = replace(
        job, before=job.before * times, backward=job.backward * times, ready=tuple(r * times for r in job.ready)
    )
    assert seconds(slower) >= seconds(job) * (1 - 1e-9)


def test_no_example_is_timed() -> None:
    """See conftest.py: an example, here and in all files that have some, may take longer on a machine that is busy."""
    assert settings().deadline is None
