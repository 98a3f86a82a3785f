"""Where DDP reduces in no step, ranks that part are told of it; and only there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from on_ranks import on_ranks
from unreduced_checks import WORLD, checks

from autoddp.knobs import FirstLook, ObservedSteps, knobs_of, why_left_out
from autoddp.knobs.hook import DIVIDES_BY_THOSE_LEFT
from autoddp.knobs.job import NEVER_REDUCES, OWN_MODELS


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(WORLD, checks, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("how", ["direct", "no_sync"])
def test_ranks_that_train_alone_are_told_once(ranks: list[dict[str, Any]], how: str) -> None:
    assert [line for rank in ranks for line in rank[how]] == [OWN_MODELS]


@pytest.mark.parametrize("how", ["plain", "sometimes", "gradients", "parameters", "every sixth", "one of two"])
def test_others_are_not(ranks: list[dict[str, Any]], how: str) -> None:
    assert [rank[how] for rank in ranks] == [[]] * WORLD


def look(forwards: tuple[int, ...], *checksums: tuple[str, ...]) -> FirstLook:
    steps = ObservedSteps(
        is_static=False, forwards=forwards, steps_by_closure=False, clears=True, one_optimizer=True, why_no_graphs={}
    )
    return FirstLook(
        steps=[replace(steps, unreduced=one) for one in checksums],
        devices=frozenset({"cpu"}),
        torch="2.13",
        available_arguments=frozenset({"bucket_cap_mb"}),
        arguments=[{}],
    )


def test_no_knob_of_the_reduction_is_tuned_where_there_is_none() -> None:
    apart = look((0,) * 20, ("1 cpu", "2 cpu"), ("3 cpu", "4 cpu"))
    assert {why_left_out(apart)[name] for name in ("bucket_cap_mb", "hook", "defer_reductions")} == {OWN_MODELS}
    assert "threads" not in why_left_out(apart) or why_left_out(apart)["threads"] != OWN_MODELS
    for alike in (look((0,) * 20, ("1 cpu", "2 cpu"), ("3 cpu", "2 cpu")), look((0,) * 20, ("1 a",), ("2 b",))):
        assert why_left_out(alike)["hook"] == NEVER_REDUCES
    assert {"bucket_cap_mb", "hook"} <= set(knobs_of(look((0, 0, 0, 1), (), ())))


def test_no_hook_is_tuned_where_ddp_divides_by_the_ranks_that_have_inputs() -> None:
    seen = look((1, 1), ())
    joins = replace(seen, steps=[replace(one, joins=True, divides_by_those_left=True) for one in seen.steps])
    assert "hook" in knobs_of(seen)
    assert why_left_out(joins)["hook"] == why_left_out(joins)["powersgd_rank"] == DIVIDES_BY_THOSE_LEFT
