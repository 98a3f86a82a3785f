"""The gradient error that the live comparison reports is the one worked out by hand, for every kind of hook."""

from __future__ import annotations

from typing import Any

import pytest
from fidelity_checks import WORLD, checks
from on_ranks import on_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(WORLD, checks, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", ["fp16", "bf16", "powersgd 1", "powersgd 8"])
def test_it_is_the_error_of_what_ddp_left_in_the_gradients(ranks: list[dict[str, Any]], name: str) -> None:
    found = ranks[0][name]
    assert found["relative"] == pytest.approx(found["own_relative"], rel=1e-3)
    assert found["of_sum"] == pytest.approx(found["own_of_sum"], rel=1e-3)
    assert (found["steps"], found["finite"]) == (4, True)
    assert 0 < found["cosine"] <= 1
    assert found["worst"] == pytest.approx(found["own_worst"], rel=1e-3)
    assert found["worst_of_sum"] == pytest.approx(found["own_worst_of_sum"], rel=1e-3)


def test_a_watched_hook_has_the_same_error(ranks: list[dict[str, Any]]) -> None:
    """The error of one step whole, that of the sum from a sample; the same to the last bit on all ranks."""
    for name, of_sum in {"watched bf16": "own_relative", "watched powersgd": "own_of_sum"}.items():
        found = ranks[0][name]
        assert found["relative"] == pytest.approx(found["own_relative"], rel=1e-3)
        assert found["of_sum"] == pytest.approx(found[of_sum], rel=0.1 if name.endswith("sgd") else 1e-3)
        worst = "own_worst_of_sum" if name.endswith("sgd") else "own_worst"
        assert found["worst_of_sum"] == pytest.approx(found[worst], rel=0.2 if name.endswith("sgd") else 1e-3)
        assert len({(rank[name]["relative"], rank[name]["of_sum"]) for rank in ranks}) == 1


def test_the_watch_keeps_nothing_of_the_gradients_size(ranks: list[dict[str, Any]]) -> None:
    """In parts of the gradients. What is held is there at the next forward pass, when activations take the memory."""
    for found in ranks:
        assert found["watched bf16"]["held"] == 0
        assert 0 < found["watched powersgd"]["held"] < 0.25  # samples of its buckets


def test_the_host_does_not_wait_for_each_parameter(ranks: list[dict[str, Any]]) -> None:
    assert {name: found["waits"] for name, found in ranks[0].items() if found["waits"]} == {}


def test_all_ranks_find_the_same(ranks: list[dict[str, Any]]) -> None:
    for name, found in ranks[0].items():
        for other in ranks[1:]:
            assert other[name]["relative"] == pytest.approx(found["relative"], rel=1e-6)


def test_formats_and_ranks_are_told_apart(ranks: list[dict[str, Any]]) -> None:
    errors = {name: found["relative"] for name, found in ranks[0].items()}
    assert errors["fp16"] < 0.0006 < errors["bf16"] < 0.006
    assert errors["powersgd 1"] > 0.9  # noise has full rank: nothing to compress
    assert ranks[0]["powersgd 8"]["of_sum"] < 0.9 < ranks[0]["powersgd 1"]["of_sum"]
    assert max(errors["fp16 tiny"], errors["fp16 large"]) < 0.0006  # as they are, float16 would lose all of them


def test_overflow_is_the_hooks_only_where_the_exact_mean_is_finite(ranks: list[dict[str, Any]]) -> None:
    assert not ranks[0]["fp16 overflow"]["finite"]
    assert ranks[0]["script's own overflow"]["finite"]
    assert ranks[0]["script's own overflow"]["relative"] < 0.006


def test_the_worst_parameter_is_named(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["powersgd 8"]["worst_parameter"].startswith("values.")
