"""A rank finds how far its clock is from that of rank 0, and how far it may be wrong."""

from __future__ import annotations

import doctest
import os
import threading
import time
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from launchers import environment, free_port, run_python
from on_ranks import on_ranks
from torch.distributed import HashStore, TCPStore

from autoddp.worker.process import clock_offset as clocks
from autoddp.worker.process.clock_offset import ClockOffset, answer, ask, clock_name, mean_of, offset_of
from autoddp.worker.process.rank_store import RankStore

WAYS = some.floats(0, 1)  # seconds that a question or an answer is on its way
AHEAD = {1: 1234.5, 2: -0.75}


@given(some.floats(-1e6, 1e6), some.lists(some.tuples(WAYS, WAYS, WAYS), min_size=1, max_size=8))
def test_the_truth_is_within_the_error_whatever_way_is_slow(ahead: float, trips: list[tuple[float, ...]]) -> None:
    stamps = [(0.0, there + ahead, there + busy + ahead, there + busy + back) for there, busy, back in trips]
    found = offset_of(stamps)
    assert abs(found.seconds - ahead) <= found.error + 1e-8
    assert found.error == pytest.approx(min(there + back for there, _, back in trips) / 2, abs=1e-8)


@given(some.floats(-10, 10), some.floats(-1, 1), some.floats(0, 1))
def test_a_clock_that_drifts_is_right_within_the_error_at_all_times(ahead: float, drift: float, when: float) -> None:
    between = mean_of(ClockOffset(ahead, 0.002), ClockOffset(ahead + drift, 0.001))
    assert abs(between.seconds - (ahead + when * drift)) <= between.error - 0.002 + 1e-9


@pytest.mark.parametrize("ahead", [0.0, 1e6, -3.25])
def test_an_offset_is_found_through_a_store(ahead: float) -> None:
    store = HashStore()
    first = threading.Thread(target=answer, args=[store, "key", lambda: time.perf_counter() + ahead])
    first.start()
    found = ask(store, "key")
    first.join()
    assert abs(found.seconds - ahead) <= found.error + 1e-8
    assert 0 < found.error < 0.05


def test_the_example_is_true() -> None:
    assert doctest.testmod(clocks) == doctest.TestResults(failed=0, attempted=1)


def checks(rank: int) -> dict[str, Any]:
    """Ranks whose clocks are `AHEAD` of the one of rank 0."""
    port = int(os.environ["MASTER_PORT"])
    host = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False) if rank == 0 else None
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3"}
    ranks = RankStore()
    as_it_is = ranks.clock_offset()
    found = ranks.clock_offset(lambda: time.perf_counter() + AHEAD.get(rank, 0.0), name="")
    names = ranks.clock_offset(lambda: time.perf_counter() + AHEAD.get(rank, 0.0), name="ab"[rank == 2])
    ranks.part()
    assert rank or host is not None  # it serves until here
    return {"as it is": astuple(as_it_is), "found": astuple(found), "names": astuple(names)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, ClockOffset]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MASTER_ADDR", "127.0.0.1")
        patched.setenv("MASTER_PORT", free_port())
        found = on_ranks(3, checks, tmp_path_factory.mktemp("ranks"))
    return [{name: ClockOffset(*offset) for name, offset in of_rank.items()} for of_rank in found]


@pytest.mark.parametrize("rank", AHEAD)
def test_each_rank_finds_its_own_offset(ranks: list[dict[str, ClockOffset]], rank: int) -> None:
    found = ranks[rank]["found"]
    assert abs(found.seconds + AHEAD[rank]) <= found.error + 1e-8
    assert 0 < found.error < abs(AHEAD[rank])
    assert ranks[0]["found"] == ClockOffset()


def test_ranks_that_read_one_clock_need_no_exchange(ranks: list[dict[str, ClockOffset]]) -> None:
    assert all(of_rank["as it is"] == ClockOffset() for of_rank in ranks)
    assert ranks[1]["names"] == ClockOffset()
    other = ranks[2]["names"]
    assert abs(other.seconds + AHEAD[2]) <= other.error + 1e-8


def test_a_clock_has_one_name_in_all_processes() -> None:
    program = "from autoddp.worker.process.clock_offset import clock_name; print(clock_name())"
    other = run_python(["-c", program], env=environment())
    assert other.stdout.strip() == clock_name() != ""


def test_where_the_kernel_does_not_say_the_clock_has_no_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("autoddp.worker.process.clock_offset.Path", lambda _: tmp_path / "missing")
    assert clock_name() == ""
