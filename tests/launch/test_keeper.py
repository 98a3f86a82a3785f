"""The process that watches over attempts: it works however the launcher was started, and it may be killed."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import pytest

from autoddp.isolation import Level
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
