"""A recording of some steps is complete and right, changes no number, and leaves nothing behind."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from launchers import free_port
from on_ranks import on_ranks
from timeline_checks import AHEAD, CASES, PARAMETERS, RECORDED, blocks, checks, checks_of_three

from autoddp import codec
from autoddp.timing.timeline import Timeline
from autoddp.trace import check, order_of, trace_of
from autoddp.trace.order import reductions_of
from autoddp.wire import BlockDone
from autoddp.worker.trial import runner

NOT_TIMED = {
    "script's hook": "the script registers a communication hook of its own",
    "sparse": "gradients are sparse",
    "join": "the script trains inside join()",
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(2, checks, tmp_path_factory.mktemp("ranks"))


def timelines(ranks: list[dict[str, Any]], case: str) -> list[Timeline]:
    found = [codec.convert(of_rank[case]["recorded"]["timeline"], Timeline) for of_rank in ranks]
    return [codec.replace(one, rank=rank) for rank, one in enumerate(found)]  # no launcher has told them theirs


@pytest.mark.parametrize("case", [name for name in CASES if name != "slow"])
def test_no_number_changes(ranks: list[dict[str, Any]], case: str) -> None:
    """The parameters, buffers and gradients after each step, to the last bit."""
    for of_rank in ranks:
        assert of_rank[case]["recorded"]["digests"] == of_rank[case]["without"]["digests"]


def test_nor_where_a_mean_is_rounded(tmp_path: Any) -> None:
    """Until the recording ends: DDP's new reducer first has other buckets, in which gloo adds in another order."""
    for of_rank in on_ranks(3, checks_of_three, tmp_path):
        without, recorded = (of_rank[name]["digests"][: RECORDED.stop] for name in ("without", "recorded"))
        assert without == recorded
        assert len(set(without)) == RECORDED.stop


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_left_over(ranks: list[dict[str, Any]], case: str) -> None:
    for of_rank in ranks:
        found, without = of_rank[case]["recorded"], of_rank[case]["without"] or of_rank["plain"]["without"]
        assert found["left over"] == []
        assert found["hooks"] == without["hooks"]
        if case != "slow":
            assert found["attributes"] == without["attributes"]


@pytest.mark.parametrize("case", [name for name in CASES if name not in ("cut off", "unused", "sparse")])
def test_each_gradient_is_seen_in_each_step(ranks: list[dict[str, Any]], case: str) -> None:
    times = CASES[case].get("micro_batches", 1)
    parameters = PARAMETERS * CASES[case].get("models", 1)
    for one in timelines(ranks, case):
        assert (len(one.steps), len(one.parameter_bytes)) == (len(RECORDED), parameters)
        for begin, end in pairwise((0.0, *one.steps)):
            seen = [g.parameter for g in one.gradients if begin < g.ready <= end]
            assert sorted(seen) == sorted(list(range(parameters)) * times)
        assert [span.end for span in one.spans] == list(one.steps)


@pytest.mark.parametrize("case", [name for name in CASES if name not in NOT_TIMED and name != "cut off"])
def test_each_bucket_is_seen_in_each_step(ranks: list[dict[str, Any]], case: str) -> None:
    for one in timelines(ranks, case):
        assert one.no_buckets == ""
        for begin, end in pairwise((0.0, *one.steps)):
            buckets = [b for b in one.buckets if begin < b.launched <= b.ended <= end]
            assert sum(b.bytes for b in buckets) == sum(one.parameter_bytes)
            if case != "two models":
                assert [b.index for b in buckets] == list(range(len(buckets)))
        assert len(one.buckets) % len(RECORDED) == 0
    assert len(timelines(ranks, "plain")[0].buckets) == LAUNCHES * len(RECORDED)


LAUNCHES = 4
"""Of a step of the plain case: a layer of 16 KiB is more than a bucket should have."""


def test_a_bucket_is_launched_when_its_gradients_are_ready(ranks: list[dict[str, Any]]) -> None:
    """Of one bucket that holds all, in the first step."""
    for one in timelines(ranks, "one bucket"):
        last = max(g.ready for g in one.gradients if g.ready <= one.steps[0])
        assert last <= one.buckets[0].launched < one.steps[0]


@pytest.mark.parametrize(("case", "why"), NOT_TIMED.items())
def test_why_buckets_are_not_recorded_is_told(ranks: list[dict[str, Any]], case: str, why: str) -> None:
    for one in timelines(ranks, case):
        assert (one.no_buckets, one.buckets) == (why, ())
        assert one.gradients


def test_reductions_end_when_the_last_rank_has_come(ranks: list[dict[str, Any]]) -> None:
    """Rank 1 sleeps in each step. How long rank 0 waits is left to the machine; that it waits is not."""
    found, unmatched = reductions_of(timelines(ranks, "slow"))
    assert (len(found), unmatched) == (LAUNCHES * len(RECORDED), 0)
    for one in found:
        assert all(part.ended >= one.last.launched for part in one.parts)


@pytest.mark.parametrize("case", CASES)
def test_a_trace_of_it_keeps_the_format(ranks: list[dict[str, Any]], case: str) -> None:
    found = timelines(ranks, case)
    assert check(trace_of(found)) == []
    if case not in NOT_TIMED:
        assert order_of(found).reductions == len(found[0].buckets)
        assert order_of(found).contradictions == 0


def test_a_recording_that_is_cut_off_has_the_steps_until_then(ranks: list[dict[str, Any]]) -> None:
    for one in timelines(ranks, "cut off"):
        assert len(one.steps) == 1
        assert len(one.gradients) == PARAMETERS
        assert len(one.buckets) == LAUNCHES


def test_only_an_object_that_had_no_hook_gets_a_new_reducer(ranks: list[dict[str, Any]]) -> None:
    anew = {case: ranks[0][case]["recorded"]["anew"] for case in CASES}
    assert {case for case in CASES if not anew[case]} == {*NOT_TIMED, "bf16", "powersgd"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank got of the runner: blocks, steps of the script in each, what was left over."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MASTER_ADDR", "127.0.0.1")
        patched.setenv("MASTER_PORT", free_port())
        found = on_ranks(2, blocks, tmp_path_factory.mktemp("blocks"))
    return [[codec.decode(told, tuple[BlockDone, ...]), *more] for told, *more in found]


def test_the_leading_launcher_hears_of_a_block_first(measured: list[Any]) -> None:
    """If it never does, because rank 0 is killed, no other host may have a figure for what this one calls failed."""
    (*_, first), (*_, then) = measured
    assert len(first) == len(then) == 4
    assert all(one < other for one, other in zip(first, then, strict=True))


def test_a_block_ends_with_the_steps_that_are_recorded(measured: list[Any]) -> None:
    """All ranks hear of all timelines; before them comes one more step.

    A block of the same configuration after one begins with two steps, in which DDP sorts its buckets anew.
    """
    (done, steps, left, *_), (heard, *_) = measured
    assert [[len(one.steps) for one in block.timelines] for block in done] == [[3, 3], [2, 2], [], [1, 1]]
    assert [block.timelines for block in heard] == [block.timelines for block in done]
    assert steps == [1 + 2 + 2 + 1 + 3, 2 + 1 + 1 + 1 + 2, 2 + 2, 1 + 1 + 1 + 1]
    assert left == [0, 0]
    assert [len(block.seconds) for block in done] == [2, 1, 2, 1]
    assert done[1].error is not None


def test_stages_gradients_and_buckets_have_one_clock(measured: list[Any]) -> None:
    for one in measured[0][0][0].timelines:
        assert one.spans[0].begin == 0.0
        assert one.spans[-1].end == one.steps[-1]
        assert all(before.end == after.begin for before, after in pairwise(one.spans))
        assert {"data", "forward", "backward", "exposed", "optimizer", "other"} <= {span.name for span in one.spans}
        within = [span for span in one.spans if span.name in ("backward", "exposed")]
        assert len(one.gradients) == PARAMETERS * len(one.steps)
        for moment in [g.ready for g in one.gradients] + [b.launched for b in one.buckets]:
            assert any(span.begin <= moment <= span.end for span in within), (moment, one.spans)


def test_ranks_are_put_on_the_clock_of_rank_0(measured: list[Any]) -> None:
    """The clock of rank 1 is made to seem ahead, so its timeline seems to begin earlier by as much."""
    first, second = measured[0][0][0].timelines
    assert (first.rank, second.rank, first.error) == (0, 1, 0.0)
    assert 0 < second.error < AHEAD / 100
    assert second.began - first.began == pytest.approx(-AHEAD, rel=0.01)


def test_without_reduction_there_are_gradients_and_no_buckets(measured: list[Any]) -> None:
    for one in measured[0][0][3].timelines:
        assert (one.buckets, one.no_buckets) == ((), "no gradients were reduced")
        assert len(one.gradients) == PARAMETERS


def test_each_rank_measures_what_hooks_compute(measured: list[Any]) -> None:
    """After its steps, so that no time of them contains it."""
    for one in measured[0][0][0].timelines:
        assert one.arithmetic is not None
        assert one.arithmetic.low_rank > 0


def test_timelines_that_are_too_long_lose_gradients(ranks: list[dict[str, Any]], monkeypatch: Any) -> None:
    first, second = timelines(ranks, "plain")
    monkeypatch.setattr(runner, "_TIMELINES", len(codec.encode(first)) - 1)
    kept, shorter = runner._fitting([first, second])
    assert kept == first
    assert shorter == codec.replace(second, gradients=())
