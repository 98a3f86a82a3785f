"""Values of any size travel between ranks, whatever torch's store takes at once."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from launchers import free_port
from torch.distributed import TCPStore

from autoddp.worker.process import rank_store
from autoddp.worker.process.rank_store import RankStore


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[RankStore]:
    """Two ranks of this process, on a store that lives as long as they do."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port := free_port())
    host: Any = TCPStore("127.0.0.1", int(port), None, True, wait_for_workers=False)
    found = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        found.append(RankStore())
    found[0].__dict__["host"] = host
    return found


def both(ranks: list[RankStore], what: Any) -> list[Any]:
    """What `what` returns on each rank, called at the same time."""
    found: list[Any] = [None, None]

    def call(rank: RankStore) -> None:
        found[rank.rank] = what(rank)

    threads = [threading.Thread(target=call, args=[rank]) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("length", [0, 1, 9 * 2**20])
def test_a_value_of_any_size(ranks: list[RankStore], length: int) -> None:
    """torch's store closes the connection where a value has more than 8 MiB."""
    text = "é" * (length // 6) + "x" * (length % 6)  # six bytes of JSON each
    assert both(ranks, lambda rank: rank.share(text if rank.rank == 0 else None)) == [text, text]
    assert both(ranks, lambda rank: rank.gather([rank.rank, text])) == [[[0, text], [1, text]], []]


@pytest.mark.parametrize("length", [7, 8, 9, 15, 16, 17, 31])
def test_parts_are_put_together(ranks: list[RankStore], monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(rank_store, "_PART", 8)
    value = "0123456789" * 4
    assert both(ranks, lambda rank: rank.share(value[:length])) == [value[:length]] * 2


def test_a_number_that_is_known_once_all_have_come_so_far(ranks: list[RankStore]) -> None:
    """As the step behind which all leave. One rank may come alone for long, and waits for nobody."""
    first, second = ranks
    assert [first.once_all_have("come", 7), first.once_all_have("come", 8)] == [None, None]
    assert [second.once_all_have("come", 5), first.once_all_have("come", 9)] == [5, 5]


def test_a_store_that_cannot_be_reached_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can hear this rank: the others would wait for it for hours."""
    monkeypatch.setattr(rank_store, "_CONNECTS", timedelta(seconds=1))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", free_port())
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="client socket"):
        RankStore()


def test_a_rank_that_evaluates_alone_is_waited_for(ranks: list[RankStore]) -> None:
    store = ranks[0].__dict__["_store"].underlying_store
    assert store.timeout == rank_store._PATIENCE > rank_store._CONNECTS
