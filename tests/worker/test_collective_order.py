"""Sixteen ranks ask for the same collectives in the same order, whatever is configured: collective_checks.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from collective_checks import MIXTURES, OTHERS, VALUES, WORLD, Asked, asked_by, asked_from_callbacks, in_waves

from autoddp.knobs import KNOBS, Reach


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Asked]]:
    """Some of the sixteen; all of them under --whole."""
    asked = range(WORLD) if request.config.getoption("--whole") else (0, 1, 7, WORLD - 1)
    return in_waves(asked_by, asked, tmp_path_factory.mktemp("ranks"))


def test_all_ranks_ask_for_the_same(ranks: list[dict[str, Asked]]) -> None:
    first = ranks[0]
    assert {name for rank in ranks for name in first if rank[name] != first[name]} == set()
    assert all(first.values())


def test_each_value_and_some_mixtures_were_tried(ranks: list[dict[str, Asked]]) -> None:
    assert len(ranks[0]) == sum(map(len, VALUES.values())) + MIXTURES
    assert {knob.name for knob in KNOBS if knob.reach is not Reach.START} == VALUES.keys() | OTHERS
    assert len({tuple(asked) for asked in ranks[0].values()}) > len(VALUES)
    sent = " ".join(what for asked in ranks[0].values() for call in asked for what in call)
    assert "torch.float16" in sent
    assert "torch.bfloat16" in sent


def test_another_order_on_some_rank_is_seen(tmp_path: Path) -> None:
    asked = in_waves(asked_from_callbacks, range(4), tmp_path)
    assert sorted(asked[0]) == sorted(asked[1])
    assert len({tuple(of_rank) for of_rank in asked}) > 1
