"""Calls that are done again end with the launcher, whatever ends that."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
from launchers import environment

from autoddp import codec
from autoddp.wire.replayed_calls import WAIT, Act, Program, Replay

LAUNCHER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-m", "autoddp.worker.bench.replay", *sys.argv[1:]], start_new_session=True)
time.sleep(1000)
"""


def with_result(result: Path) -> set[int]:
    """Processes that have that path among their words: the replay, and its ranks."""
    found = set()
    for one in psutil.process_iter(["cmdline"]):
        words = one.info["cmdline"] or []
        if str(result) in words and "autoddp.worker.bench.replay" in words:
            found.add(one.pid)
    return found


def wait_for(count: int, result: Path) -> None:
    until = time.monotonic() + 60
    while len(with_result(result)) != count:
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_replay_ends_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    plan, result = tmp_path / "plan.json", tmp_path / "result.json"
    long = Program(((0,),), ((Act(WAIT, sleeps=1000.0),),))
    plan.write_text(codec.encode(Replay({"as written": long}, 1, 1, "gloo", 1.0)))
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(plan), str(result)], env=environment())
    try:
        wait_for(2, result)  # the replay, and its one rank
    finally:
        launcher.kill()
        launcher.wait()
    wait_for(0, result)
