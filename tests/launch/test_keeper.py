"""The process that watches over attempts: it works however the launcher was started, and it may be killed."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import pytest

from autoddp.isolation import Level
from autoddp.launch import keeper as keepers
from autoddp.launch.keeper import Attempt, Keeper, Shelter


@pytest.fixture
def children_are_ignored():
    """As under some schedulers, which start their jobs so."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


def test_a_launcher_that_ignores_its_children(children_are_ignored: None) -> None:
    keeper = Keeper()
    try:
        assert keeper.why_no_overlay(Shelter(Level.OFF)) == ""
        assert keeper.why_no_overlay(Shelter(Level.OFF)) == ""
    finally:
        keeper.close()


def test_a_killed_keeper_is_a_reason_and_no_exception(tmp_path: Path) -> None:
    keeper = Keeper()
    os.kill(keeper.pid, signal.SIGKILL)
    os.waitid(os.P_PID, keeper.pid, os.WEXITED | os.WNOWAIT)
    gone = "the process that watches over the attempt was killed"
    keeper.removes([str(tmp_path)])
    assert keeper.why_no_overlay(Shelter(Level.OFF)) == gone
    attempt = Attempt(argparse.Namespace(), tmp_path, 0, {}, Shelter(Level.OFF))
    assert keeper.run(attempt, lambda _: None, lambda: False) == gone
    keeper.close()


def test_a_late_word_to_stop_names_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the keeper cleans up after an attempt, it is told again and again to stop that attempt."""
    removed = tmp_path / "removed"

    def note(folder: str) -> None:
        with removed.open("a") as file:
            file.write(f"{folder}\n")

    monkeypatch.setattr(keepers, "remove_folder", note)  # in the keeper too, which is forked
    keeper = Keeper()
    keeper._connection.send(keepers._STOP)
    keeper.removes([str(tmp_path / "scratch")])
    keeper._connection.send(keepers._STOP)
    keeper.close()
    assert removed.read_text().splitlines() == [str(tmp_path / "scratch")]
