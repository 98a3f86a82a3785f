"""Under the guard a script sees what it would see without, and the real tree stays as it was.

Random programs of many file-system operations (`guard_programs.py`) run plainly in one tree and guarded in its twin.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from guard_programs import plant
from guarded import ROOT, TESTS, snapshot
from launchers import whole

BATCHES = [(0, 20), whole(20, 50), whole(430, 460), (460, 480)]


def _run(mode: str, trees: Path, scratch: Path, first: int, last: int) -> list[Any]:
    words = [sys.executable, str(TESTS / "guard_programs.py"), mode, str(trees), str(scratch), str(first), str(last)]
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{ROOT}"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("first", "last"), BATCHES)
def test_programs_have_the_same_outcome(tmp_path: Path, first: int, last: int) -> None:
    plain, guarded = tmp_path / "plain", tmp_path / "guard"
    for trees in (plain, guarded):
        trees.mkdir()
        for seed in range(first, last):
            plant(f"{trees}/{seed}", seed)
    before = snapshot(guarded)
    expected = _run("plain", plain, tmp_path / "unused", first, last)
    found = _run("guard", guarded, tmp_path / "scratch", first, last)
    assert snapshot(guarded) == before
    assert len(found) == len(expected) == last - first
    for (seed, steps), (_, expected_steps) in zip(found, expected, strict=True):
        for step, expected_step in zip(steps, expected_steps, strict=True):
            assert step == expected_step, f"program {seed}"
