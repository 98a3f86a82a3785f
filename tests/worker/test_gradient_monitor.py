"""A watched hook in the real job: given up on all ranks at once where it is no longer good enough, else left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradient_monitor_checks import TURN, WORLD, checks
from on_ranks import on_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(WORLD, checks, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", ["overflow", "one cancels", "tiny", "noise", "good"])
def test_all_ranks_keep_the_same_parameters(ranks: list[dict[str, Any]], name: str) -> None:
    for other in ranks[1:]:
        for mine, theirs in zip(ranks[0][name]["parameters"], other[name]["parameters"], strict=True):
            assert torch.equal(mine, theirs)
            assert torch.isfinite(mine).all()


def test_an_overflow_costs_no_step(ranks: list[dict[str, Any]]) -> None:
    """The step that overflows is exact already where it does, and from the next one on everything is."""
    for found in (rank["overflow"] for rank in ranks):
        assert found["told"] == [f"back to exact gradients from reduction {TURN + 2} on: gradients overflow float16"]
        assert max(found["errors"][: TURN + 1]) < 2**-10
        assert max(found["errors"][TURN + 1 :]) < 1e-6


def test_gradients_below_float16_are_sent_all_the_same(ranks: list[dict[str, Any]]) -> None:
    """They fall by a factor of 1e8 within a step: after one more they have all bits of float16 again."""
    for found in (rank["tiny"] for rank in ranks):
        assert max(found["errors"][TURN + 1 :]) < 2**-10


def test_one_lost_parameter_is_enough_to_give_up(ranks: list[dict[str, Any]]) -> None:
    """A norm over all parameters hides it."""
    for found in (rank["one cancels"] for rank in ranks):
        (told,) = found["told"]
        assert "% in values.5, above the near rung's limit of 2.00 %" in told
        given_up = int(told.split("reduction ")[1].split()[0]) - 1
        assert TURN < given_up <= TURN + 11
        assert max(found["errors"][:given_up]) < 0.02
        assert max(found["errors"][given_up:]) < 1e-6


def test_one_parameter_in_one_step_is_not_enough(ranks: list[dict[str, Any]]) -> None:
    assert [rank["passes zero"]["told"] for rank in ranks] == [[]] * WORLD


def test_noise_is_too_much_for_powersgd(ranks: list[dict[str, Any]]) -> None:
    for found in (rank["noise"] for rank in ranks):
        (told,) = found["told"]
        given_up = int(told.split("reduction ")[1].split()[0]) - 1
        assert TURN < given_up <= TURN + 12
        assert max(found["errors"][given_up:]) < 1e-6


def test_a_good_hook_stays(ranks: list[dict[str, Any]]) -> None:
    for found in (rank["good"] for rank in ranks):
        assert found["told"] == []
        assert 0 < max(found["errors"]) < 1e-4
