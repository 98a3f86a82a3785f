"""While an attempt does not come to its first steps, a line says where each rank is; it does not wait for ever."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from launchers import start

from autoddp.launch.waiting import Waiting

SCRIPT = """
import os, time

def load_data():
    time.sleep(1000)

if os.environ["RANK"] == "1":
    load_data()
import torch.distributed as dist
dist.init_process_group("gloo")
"""


def test_the_ranks_and_their_places_are_named(tmp_path: Path) -> None:
    """One rank sleeps before the process group is made, the other one waits for it there."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    shorter = (
        "import sys; from autoddp.launch import waiting; waiting._FIRST_WORD = waiting._NEXT_WORD = 4.0; "
        "waiting._GIVEN_UP = 20.0; "
        "from autoddp.cli.main import main; sys.argv[0] = 'autoddp'; main()"
    )
    words = ["--nproc-per-node", "2", "--trials", "1", "--tune-only", str(script)]
    launch = start((sys.executable, "-c", shorter), tmp_path / "run", words).wait()
    line = [line for line in launch.stderr.splitlines() if "waiting for the first steps" in line][-1]
    assert "rank 1 is in train.py, line 5" in line
    assert "rank 0 is in init_process_group, called in train.py, line 10" in line
    (end,) = [line for line in launch.stderr.splitlines() if "no recipe was written: " in line]
    assert "no rank has moved for 2" in end
    assert "rank 0 is in init_process_group" in end
    assert launch.returncode == 1
    assert launch.processes() == []


def test_lines_come_after_half_a_minute_and_each_minute(tmp_path: Path) -> None:
    now = 1000.0
    said: list[tuple[float, str]] = []
    waiting = Waiting(tmp_path, lambda text: said.append((now, text)), lambda: now)
    began = now
    for second in range(200):
        now = began + second
        (tmp_path / "0").write_text("read_all, called in data.py, line 3")
        os.utime(tmp_path / "0", (now, now))
        assert waiting.look() == ""
    assert [round(at - began) for at, _ in said] == [31, 92, 153]
    assert "rank 0 is in read_all, called in data.py, line 3 (host " in said[0][1]


def test_a_measurement_that_takes_long_is_told_with_its_limit(tmp_path: Path) -> None:
    said: list[str] = []
    waiting = Waiting(tmp_path, said.append, lambda: 1000.0)
    (tmp_path / "0").write_text("train.py, line 9")
    for measured in (20, 40, 20, 100):  # seconds of four measurements, one after another
        for second in range(measured):
            waiting.measuring(float(second), 200.0 - second)
    where = f"rank 0 is in train.py, line 9 (host {os.uname().nodename})"
    assert said == [
        f"waiting for the end of some measured steps, {after}: {where}; tuning ends in at most {left}"
        for after, left in (("31 s", "2 min 49 s"), ("31 s", "2 min 49 s"), ("1 min 32 s", "1 min 48 s"))
    ]


@pytest.mark.parametrize("jump", [0.0, 86400.0, -86400.0])
def test_movement_starts_the_clock_again(jump: float, tmp_path: Path) -> None:
    """The files' times are the system's, which may jump in between; the clock of the launcher does not."""
    now = 1000.0
    waiting = Waiting(tmp_path, lambda text: None, lambda: now)
    place = tmp_path / "3"
    place.write_text("wait")
    written = place.stat().st_mtime
    now += 1700
    assert waiting.look() == ""
    os.utime(place, (written, written + jump + 1))
    now += 1700
    assert waiting.look() == ""
    now += 1700
    assert waiting.look() == ""
    now += 200
    where = f"rank 3 is in wait, not moved for 31 min 40 s (host {os.uname().nodename})"
    assert waiting.look() == f"no rank has moved for 31 min 40 s: {where}"
