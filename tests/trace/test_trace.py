"""A trace has the format's form, and says of the timelines what is true."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from autoddp import codec
from autoddp.timing.anatomy import STAGES
from autoddp.timing.timeline import Bucket, Gradient, Span, Timeline
from autoddp.trace import check, order_of, trace_of

MOMENTS = some.floats(-1, 30, allow_nan=False)


def read(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The trace as another program reads it."""
    found: dict[str, Any] = json.loads(codec.encode(trace_of(timelines)))
    return found


def named(trace: dict[str, Any], phase: str, name: str = "") -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e["ph"] == phase and e["name"].startswith(name)]


def two_ranks(ahead: float = 0.0, error: float = 0.0) -> list[Timeline]:
    """Rank 1 launches 20 ms after rank 0, and both are done 10 ms later; its clock is wrongly taken as `ahead`."""
    spans = (Span("forward", 0.0, 0.1), Span("backward", 0.1, 0.3))
    gradients = (Gradient(1, 0.15), Gradient(0, 0.19))
    one = Timeline(0, "a", 1000.0, 0.0, (0.3,), spans, gradients, (Bucket(0, 4096, 0.2, 0.23),), (2048, 2048))
    other = Timeline(1, "b", 1000.5 + ahead, error, (0.3,), spans, (), (Bucket(0, 4096, -0.28, -0.27),))
    return [one, other]


@some.composite
def timelines(draw: some.DrawFn) -> list[Timeline]:
    found = []
    since_start = draw(some.floats(-1e7, 1e7, allow_nan=False))  # of the machine: seconds on its clock
    for rank in range(draw(some.integers(1, 4))):
        cuts = sorted(draw(some.lists(MOMENTS, min_size=2, max_size=12)))
        spans = [Span(draw(some.sampled_from(STAGES)), a, b) for a, b in pairwise(cuts)]
        steps = sorted(draw(some.lists(MOMENTS, min_size=1, max_size=3)))
        launched = draw(some.lists(some.tuples(MOMENTS, MOMENTS), max_size=6))
        buckets = [Bucket(n, 4 * n, min(pair), max(pair)) for n, pair in enumerate(launched)]
        ready = [Gradient(n, moment) for n, moment in enumerate(draw(some.lists(MOMENTS, max_size=6)))]
        began, error = since_start + draw(some.floats(-100, 100, allow_nan=False)), draw(some.floats(0, 0.1))
        host = draw(some.text(max_size=8))
        found.append(Timeline(rank, host, began, error, tuple(steps), tuple(spans), tuple(ready), tuple(buckets)))
    return found


@given(timelines())
def test_every_trace_keeps_the_format(ranks: list[Timeline]) -> None:
    trace = read(ranks)
    assert check(trace) == []
    assert len(named(trace, "X", "all-reduce")) == sum(len(one.buckets) for one in ranks)
    assert {e["pid"] for e in named(trace, "M", "process_name")} == {e["pid"] for e in trace["traceEvents"]}
    threads = {(e["pid"], e["tid"]) for e in named(trace, "M", "thread_name")}
    assert {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["ph"] != "M"} <= threads
    assert len({tid for _, tid in threads}) == len(threads)  # no two processes share a thread's number


@given(timelines())
def test_no_slice_is_lost_or_changes_its_length(ranks: list[Timeline]) -> None:
    trace = read(ranks)
    for one in ranks:
        stages = {e["tid"] for e in named(trace, "M", "thread_name") if e["args"]["name"].startswith("stages")}
        drawn = [e for e in named(trace, "X") if e["pid"] == one.rank + 1 and e["tid"] in stages]
        found = sorted((e["name"], round(e["dur"] / 1e6, 5)) for e in drawn)
        expected = sorted((span.name, round(span.end - span.begin, 5)) for span in one.spans)
        assert [name for name, _ in found] == [name for name, _ in expected]
        for (_, drawn_for), (_, lasted) in zip(found, expected, strict=True):
            assert drawn_for == pytest.approx(lasted, abs=2e-5)


def test_nothing_gives_an_empty_trace() -> None:
    assert read([])["traceEvents"] == []
    assert check(read([])) == []


def test_ranks_are_put_on_one_clock() -> None:
    trace = read(two_ranks())
    first, second = named(trace, "X", "all-reduce")
    assert (first["pid"], second["pid"]) == (1, 2)
    assert first["ts"] - named(trace, "X", "forward")[0]["ts"] == pytest.approx(200e3)
    assert second["ts"] - first["ts"] == pytest.approx(20e3)
    assert first["ts"] + first["dur"] == pytest.approx(second["ts"] + second["dur"])


def test_the_early_rank_waits_inside_its_reduction() -> None:
    trace = read(two_ranks())
    (waits,) = named(trace, "X", "waits")
    assert (waits["pid"], waits["name"], waits["dur"]) == (1, "waits for rank 1", pytest.approx(20e3))
    assert named(trace, "X", "all-reduce")[0]["args"] == {"bytes": 4096, "step": 0, "last rank": 1}


def test_an_arrow_leads_from_a_bucket_to_its_reduction() -> None:
    trace = read(two_ranks())
    begin, end = named(trace, "s")[0], named(trace, "f")[0]
    assert begin["id"] == end["id"]
    threads = {e["tid"]: e["args"]["name"] for e in named(trace, "M", "thread_name")}
    assert (threads[begin["tid"]], threads[end["tid"]]) == ("buckets", "reductions")
    (bucket,) = [e for e in named(trace, "X", "bucket") if e["pid"] == 1]
    assert (bucket["dur"], bucket["args"]) == (pytest.approx(50e3), {"bytes": 4096, "gradients": 2})


def test_gradients_of_passes_without_a_reduction_fill_no_bucket() -> None:
    """Two backward passes, of which the first is under no_sync: its gradients are not reduced."""
    names = ("forward", "backward", "forward", "backward")
    spans = tuple(Span(name, 0.1 * number, 0.1 * (number + 1)) for number, name in enumerate(names))
    ready = tuple(Gradient(n, begin + 0.02 * (n + 1)) for begin in (0.1, 0.3) for n in range(4))
    buckets = (Bucket(0, 8, 0.34, 0.36), Bucket(1, 8, 0.38, 0.42))
    trace = read([Timeline(0, "", 0.0, 0.0, (0.5,), spans, ready, buckets, (4,) * 4)])
    first, second = named(trace, "X", "bucket")
    assert (first["ts"], first["dur"], first["args"]["gradients"]) == (pytest.approx(320e3), pytest.approx(20e3), 2)
    assert (second["ts"], second["dur"], second["args"]["gradients"]) == (pytest.approx(360e3), pytest.approx(20e3), 2)


def test_reductions_at_one_time_get_a_thread_each() -> None:
    """gloo moves two buckets at once."""
    buckets = (Bucket(0, 8, 0.0, 0.2), Bucket(1, 8, 0.1, 0.3), Bucket(2, 8, 0.2, 0.4))
    trace = read([Timeline(0, "", 0.0, 0.0, (0.5,), (), (), buckets)])
    threads = {e["tid"]: e["args"]["name"] for e in named(trace, "M", "thread_name")}
    assert [threads[e["tid"]] for e in named(trace, "X", "all-reduce")] == ["reductions", "reductions", "reductions 2"]


def test_clocks_that_fit_are_said_to_fit() -> None:
    assert str(order_of(two_ranks())) == (
        "No rank ends one of the 1 reductions before the last rank launches it; "
        "the clocks of two ranks differ by at most 0 ms."
    )


@pytest.mark.parametrize(("error", "end"), [(0.004, "so they differ by more."), (0.2, "which that explains.")])
def test_contradictions_are_counted_and_told(error: float, end: str) -> None:
    """The clock of rank 1 is wrong by 50 ms: rank 0 seems to have the sum 40 ms before rank 1 gives its part."""
    ranks = two_ranks(ahead=0.05, error=error)
    order = order_of(ranks)
    assert (order.reductions, order.contradictions, order.worst) == (1, 1, pytest.approx(0.04))
    assert str(order) == (
        "1 of 1 reductions seem to end on a rank before the last rank launches them, by up to 40 ms: "
        f"the clocks of two ranks differ by at most {1e3 * error:.3g} ms, {end}"
    )
    told = read(ranks)["otherData"]
    assert (told["contradictions"], told["order"]) == (1, str(order))
    assert told["clock_error_ms"] == {"rank 0": 0.0, "rank 1": 1e3 * error}


def test_steps_with_different_numbers_of_reductions_are_not_compared() -> None:
    first, second = two_ranks()
    more = codec.replace(second, buckets=(*second.buckets, Bucket(1, 8, -0.26, -0.25)))
    order = order_of([first, more])
    assert (order.reductions, order.unmatched) == (0, 1)
    assert check(read([first, more])) == []


def test_reductions_match_by_the_order_of_their_launches() -> None:
    """With a static graph DDP may number buckets in another order than it launches them."""
    here = (Bucket(0, 8, 0.1, 0.2), Bucket(1, 8, 0.3, 0.4))
    ranks = [Timeline(rank, "", 0.0, 0.0, (1.0,), (), (), here[:: 1 - 2 * rank]) for rank in range(2)]
    assert (order_of(ranks).reductions, order_of(ranks).contradictions) == (2, 0)


def test_why_no_buckets_are_there_is_told() -> None:
    without = Timeline(0, "a", 0.0, 0.0, (1.0,), (), no_buckets="the script registers its own hook")
    assert read([without])["otherData"]["order"] == "No reductions were recorded: the script registers its own hook."
