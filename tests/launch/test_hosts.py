"""The launchers of several hosts keep in step: a real store of torch's, one thread a host."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from launchers import free_port
from torch.distributed import TCPStore

from autoddp.isolation import Level
from autoddp.launch import hosts as module
from autoddp.launch.hosts import Hosts, Next


@pytest.fixture
def two() -> list[Hosts]:
    port = int(free_port())
    stores: list[Any] = [
        TCPStore("127.0.0.1", port, None, is_master, wait_for_workers=False) for is_master in (True, False)
    ]
    return [Hosts(store, rank, 2) for rank, store in enumerate(stores)]


def together(*calls: Any) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [call.result(60) for call in [pool.submit(*call) for call in calls]]


def quiet(text: str) -> None:
    raise AssertionError(text)


def test_one_host_asks_nobody() -> None:
    alone = Hosts()
    assert not alone.several
    assert alone.worst(Level.OVERLAY, quiet) is Level.OVERLAY
    assert alone.ended_elsewhere(0) is None
    assert alone.agree(0, Next(True), quiet) == Next(True)
    assert alone.one_recipe("x", True, quiet) == ("x", True)


def test_all_take_the_worst_level(two: list[Hosts]) -> None:
    found = together((two[0].worst, Level.OVERLAY, quiet), (two[1].worst, Level.GUARD, quiet))
    assert found == [Level.GUARD] * 2


@pytest.mark.parametrize(
    ("wanted", "all_do"),
    [
        ([Next(True), Next(True)], Next(True)),
        ([Next(True), Next(False, "it crashed")], Next(False, "it crashed")),
        ([Next(False), Next(False)], Next(False)),
        ([Next(True), Next(True, level=Level.GUARD)], Next(True, level=Level.GUARD)),
    ],
)
def test_another_attempt_only_if_all_want_it(two: list[Hosts], wanted: list[Next], all_do: Next) -> None:
    found = together(*((host.agree, 3, one, quiet) for host, one in zip(two, wanted, strict=True)))
    assert found == [all_do] * 2


def test_an_attempt_that_ends_on_one_host_ends_on_the_other_after_a_while(
    two: list[Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GRACE", 1.0)
    assert two[1].ended_elsewhere(5) is None
    began = time.monotonic()
    two[0].attempt_ended(5, "rank 0 killed by SIGABRT")
    while (found := two[1].ended_elsewhere(5)) is None:
        assert time.monotonic() - began < 30
        time.sleep(0.05)
    assert found == "rank 0 killed by SIGABRT"
    assert time.monotonic() - began > 1.0  # it may end by itself
    assert two[1].ended_elsewhere(6) is None


def test_a_host_that_says_nothing_ends_the_tuning_and_not_the_job(
    two: list[Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 1.0)
    monkeypatch.setattr(module, "_SILENT", 0.2)
    said: list[str] = []
    found = two[0].agree(0, Next(True), said.append)
    assert found.more is False
    assert "waited 1 s for the launchers of 2 hosts" in found.why
    assert said == ["waiting for the launchers of the other hosts (up to 1 s)"]
    assert two[0].one_recipe("x", True, said.append) == ("", True)


def test_all_launch_the_same_recipe(two: list[Hosts]) -> None:
    assert (
        together((two[0].one_recipe, "", False, quiet), (two[1].one_recipe, "found", True, quiet))
        == [("found", True)] * 2
    )


def test_a_store_that_is_gone_ends_the_attempt() -> None:
    port = int(free_port())
    host: Any = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    hosts = Hosts(TCPStore("127.0.0.1", port, None, False), 1, 2)
    assert hosts.ended_elsewhere(0) is None
    del host
    ended = threading.Event()

    def ask() -> None:
        while hosts.ended_elsewhere(0) is None:
            time.sleep(0.05)
        ended.set()

    threading.Thread(target=ask, daemon=True).start()
    assert ended.wait(30)


@pytest.mark.parametrize("built", [False, True])
def test_a_model_on_one_host_is_known_to_all(two: list[Hosts], built: bool) -> None:
    found = together((two[0].one_recipe, "", built, quiet), (two[1].one_recipe, "", False, quiet))
    assert found == [("", built)] * 2
