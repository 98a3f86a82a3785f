"""A script may build a new DDP object every epoch: what the job has learned holds for the next one."""

from __future__ import annotations

from typing import Any

import pytest
from new_objects_checks import STEPS, WORLD, checks
from on_ranks import on_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(WORLD, checks, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(
    "name",
    ["never long enough", "new weights", "again and again", "one step each", "beside another", "looks over four"],
)
def test_a_hook_is_given_up_once_and_for_all(ranks: list[dict[str, Any]], name: str) -> None:
    for found in (rank[name] for rank in ranks):
        (told,) = found["told"]
        given_up = int(told.split("reduction ")[1].split()[0]) - 1
        assert 8 <= given_up <= 13
        assert max(found["errors"][:given_up]) > 0.02
        assert max(found["errors"][given_up:]) < 1e-3


def test_powersgd_begins_after_as_many_reductions_of_the_training(ranks: list[dict[str, Any]]) -> None:
    """The first reduction of an object is exact: DDP makes other buckets after it."""
    for found in (rank["begins"] for rank in ranks):
        assert [step for step, error in enumerate(found["errors"]) if error > 0.1] == [
            step for step in range(10, STEPS) if step % 9
        ]


def test_powersgd_begins_anew_with_new_weights(ranks: list[dict[str, Any]]) -> None:
    for found in (rank["begins anew"] for rank in ranks):
        assert [step for step, error in enumerate(found["errors"]) if error > 0.1] == [
            step for step in range(STEPS) if step % 9 >= 5
        ]


def test_what_powersgd_owes_is_carried_over_and_goes_with_the_model(ranks: list[dict[str, Any]]) -> None:
    for found in (rank["carried over"] for rank in ranks):
        assert found["same"]
        before, first, second = found["owed"][4:7]
        assert before == first > 0
        assert second > first  # one more step of full rank was added to it
        assert found["freed"]
        assert found["gone"]
