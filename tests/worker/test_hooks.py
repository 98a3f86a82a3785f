"""The communication hooks on three gloo ranks: one launch, in which hook_checks.py measures, and many checks."""

from __future__ import annotations

from typing import Any

import pytest
from hook_checks import CAP, COMPRESSED, SHAPES, STEPS, WORLD, checks
from on_ranks import on_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(WORLD, checks, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(("name", "step"), [("fp16", 2**-10), ("bf16", 2**-7)])
def test_sixteen_bits_give_the_mean_to_sixteen_bits(ranks: list[dict[str, Any]], name: str, step: float) -> None:
    for found in (rank[name] for rank in ranks):
        assert found["buckets"] > 2
        assert 0 < max(map(max, found["errors"])) < step  # 0: nothing was rounded, so the hook did not run
        assert max(found["large"]) < step  # a sum of three would not fit into float16


@pytest.mark.parametrize(("name", "limit"), [("low rank", 1e-5), ("low rank bfloat16", 0.15)])
def test_powersgd_is_exact_for_low_rank(ranks: list[dict[str, Any]], name: str, limit: float) -> None:
    for found in (rank[name] for rank in ranks):
        assert found["buckets"] > 2
        assert max(map(max, found["errors"])) < limit


@pytest.mark.parametrize("cap", [CAP, 25.0])
def test_powersgd_pays_back_what_it_leaves_out(ranks: list[dict[str, Any]], cap: float) -> None:
    for found in (rank["feedback"][cap] for rank in ranks):
        assert max(found["books"]) < 1e-5  # what was given and what is still owed make up the exact sum
        late, early = ([found["after"][step][place] for place in COMPRESSED] for step in (STEPS - 1, 1))
        assert max(late) < 0.6 < min(early)
        whole = [found["after"][1][place] for place in range(len(SHAPES)) if place not in COMPRESSED]
        assert max(whole) < 1e-6  # vectors and thin matrices travel as they are


@pytest.mark.parametrize("cap", [CAP, 25.0])
def test_batched_powersgd_pays_back_what_it_leaves_out(ranks: list[dict[str, Any]], cap: float) -> None:
    """Of a bucket that is one matrix, vectors are a part like any other."""
    for found in (rank["batched"][cap] for rank in ranks):
        assert max(found["books"]) < 1e-5
        assert min(found["after"][1]) > 0.4 > 0.3 > max(found["after"][STEPS - 1])


def test_factors_in_sixteen_bits_are_paid_back_too(ranks: list[dict[str, Any]]) -> None:
    for found in (rank["bf16 factors"] for rank in ranks):
        assert max(found["books"][place] for place in COMPRESSED) < 1e-5
        plain = [found["books"][place] for place in range(len(SHAPES)) if place not in COMPRESSED]
        assert 0 < max(plain) < 2**-7  # what travels beside them is rounded with them


def test_powersgd_starts_when_told(ranks: list[dict[str, Any]]) -> None:
    for steps in (rank["start step"] for rank in ranks):
        assert [max(errors) > 0.1 for errors in steps] == [False, False, True, True]
        assert max(map(max, steps[:2])) < 1e-6


@pytest.mark.parametrize("name", ["zeros first", "zeros later", "overflow"])
def test_powersgd_recovers_from_bad_steps(ranks: list[dict[str, Any]], name: str) -> None:
    assert all(value < 1e-5 for rank in ranks for errors in rank[name] for value in errors)


def test_the_bucket_rebuild_mixes_nothing_up(ranks: list[dict[str, Any]]) -> None:
    assert [rank["busy layer"] for rank in ranks] == [[0.0] * 3] * WORLD


def test_delays_neither_abort_nor_part_the_ranks(ranks: list[dict[str, Any]]) -> None:
    assert {"powersgd", "bf16", "static graph, bucket_cap_mb"} <= set(ranks[0]["delayed"])
    for name in ranks[0]["delayed"]:
        assert len({rank["delayed"][name]["digest"] for rank in ranks}) == 1
        for losses in (rank["delayed"][name]["losses"] for rank in ranks):
            assert losses[-1] < losses[0]


def test_the_scripts_random_numbers_are_left_alone(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["random numbers untouched"] for rank in ranks)
