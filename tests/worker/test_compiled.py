"""Compiled models: however torch.compile was told of them, cut in other places, and replayed as its own graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compile_checks import pieces, refused, replayed, ways
from on_ranks import on_ranks


def test_compiled_is_compiled_however_it_was_done(tmp_path: Any) -> None:
    (rank,) = on_ranks(1, ways, tmp_path)
    inside, outside = (True, True), (True, False)
    assert rank["found"] == {
        "plain": (False, False),
        "inside": inside,
        "a part": inside,
        "around": outside,
        "method": outside,
    }


def test_a_compiled_model_is_cut_where_its_buckets_end(tmp_path: Any) -> None:
    """Six MiB: as written a first piece and the rest; whole; a first and three more. A hook cuts nothing anew."""
    for rank in on_ranks(2, pieces, tmp_path):
        assert rank["graphs"] == [2, 1, 4, 0, 2]
        assert [bool(count) for count in rank["counted"]] == [True, True, True, False, True]
        assert rank["called_back"] == sum(rank["counted"])
        compiled, plain = rank["states"]
        for name, tensor in compiled.items():
            torch.testing.assert_close(tensor, plain[name], msg=name)


@pytest.fixture(scope="module")
def with_replays(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(2, replayed, tmp_path_factory.mktemp("replayed"))


def test_what_ddp_calls_is_replayed_and_nothing_else(with_replays: list[dict[str, Any]]) -> None:
    for rank in with_replays:
        assert rank["why_not"] == ""
        assert rank["by_turning"] == [False, False, True, True]  # two pieces as written, compared with themselves
        assert rank["elsewhere"] == [False]
        assert rank["by_training"] == []
        assert rank["taken_back"] == [False, False]


def test_replaying_trains_as_without(with_replays: list[dict[str, Any]]) -> None:
    """BatchNorm's statistics and random numbers as if nothing had been compared, and no result overwritten."""
    for rank in with_replays:
        assert rank["left_a_trace"] == []
        assert not rank["overwritten"]
        replays, plain = rank["states"]
        for name, tensor in replays.items():
            torch.testing.assert_close(tensor, plain[name], msg=name)


def test_replaying_is_refused_with_its_reason(tmp_path: Any) -> None:
    for rank in on_ranks(2, refused, tmp_path):
        assert rank["wrong"] == "the graph of OptimizedModule does not give what the module gives"
        assert rank["left_a_trace"] == []
        assert rank["compiled"] == [False, False, True, True, False, False]
        assert rank["twice"] == "a step calls it 2 times"
        assert rank["around"] == "torch.compile was not given what is inside DDP"
