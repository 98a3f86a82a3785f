"""While an attempt does not come to its first steps, a line says where each rank is; it does not wait for ever."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from launchers import AUTODDP, start, unwrapped, wait_for, whole, with_limits

from autoddp.attempts.limits import Limits
from autoddp.attempts.rank_states import Waiting
from autoddp.codec import encode
from autoddp.wire import Heartbeat

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
    words = ["--nproc-per-node", "2", "--trials", "1", "--tune-only", str(script)]
    shorter = {"processes.silence._LONGEST": 4.0, "attempts.rank_states._GIVEN_UP": 20.0}
    launch = start(with_limits(shorter), tmp_path / "run", words).wait()
    line = [line for line in launch.stderr.splitlines() if "waiting for the script's first steps: " in line][-1]
    assert "rank 1 is in train.py, line 5" in line
    assert "rank 0 waits in init_process_group, called in train.py, line 10" in line
    (end,) = [line for line in launch.stderr.splitlines() if "no recipe was written: " in line]
    assert "no rank has moved for 2" in end
    assert "rank 0 waits in init_process_group" in end
    assert "started itself" not in launch.stderr
    assert launch.returncode == 1
    assert launch.processes() == []


OWN_RANKS = """
import multiprocessing, os, time

def train(*_):
    time.sleep(1000)

if os.environ["RANK"] == "0":
    process = multiprocessing.get_context("fork").Process(target=train)
    process.start()
    process.join()
else:
    import torch.multiprocessing
    torch.multiprocessing.start_processes(train, nprocs=2, start_method="fork")
"""


def test_ranks_that_the_script_starts_itself_wait_in_vain(tmp_path: Path) -> None:
    """As in torch's first lesson on DDP, under `mp.spawn`: where they were was told for half an hour, and not why."""
    script = tmp_path / "train.py"
    script.write_text(OWN_RANKS)
    words = ["--nproc-per-node", "2", "--trials", "1", "--tune-only", str(script)]
    launch = start(with_limits({"attempts.rank_states._JOINS": 1.0}), tmp_path / "run", words)
    try:
        says = "the script waits for processes that it has started itself. If they are its ranks, they wait in vain"
        wait_for(lambda: says in unwrapped(launch.stderr), "the line that says so")
        launch.process.send_signal(signal.SIGTERM)
        assert launch.wait().returncode == 143
        assert unwrapped(launch.stderr).count("started itself") == 1
        assert launch.processes() == []
    finally:
        launch.kill()


OWN_RANKS_END = """
import multiprocessing, os, sys, time

open("here" + os.environ["RANK"], "w").close()
while not all(os.path.exists(f"here{rank}") for rank in range(int(os.environ["WORLD_SIZE"]))):
    time.sleep(0.1)
process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3,))
process.start()
process.join()
if os.environ["WORLD_SIZE"] == "2":
    raise OSError("address already in use")
"""


@pytest.mark.parametrize(
    ("ranks", "code", "says"),
    [
        (1, 0, "The script starts its own ranks, and what these do with DDP is seen only in ranks that autoddp starts"),
        (2, 1, "address already in use; a script that starts its own ranks needs --nproc-per-node 1; see "),
    ],
)
def test_a_diagnosis_of_a_script_that_starts_its_own_ranks(ranks: int, code: int, says: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(OWN_RANKS_END)
    words = [*AUTODDP, "diagnose"], tmp_path / "run", ["--nproc-per-node", str(ranks), str(script)]
    launch = start(*words).wait()
    assert launch.returncode == code, launch.stderr[-2000:]
    assert says in " ".join(unwrapped(launch.stderr + launch.stdout).split())


def test_a_rank_that_has_ended_is_nowhere(tmp_path: Path) -> None:
    """What it has said last may be half a minute old: it was said to import torch when it had failed behind that."""
    waiting = Waiting(tmp_path)
    for rank in range(2):
        (tmp_path / str(rank)).write_text(encode(Heartbeat(f"train.py, line {rank}", 0.0, 0.0)))
    assert waiting.where().startswith("rank 0 is in train.py, line 0; rank 1 is in train.py, line 1 (host ")
    assert waiting.where((0,)).startswith("rank 1 is in train.py, line 1 (host ")
    assert waiting.where((0, 1)) == ""


@pytest.mark.parametrize(
    ("over", "left", "says"),
    [
        (False, 75.0, "; tuning ends in at most 1 min 15 s"),
        (False, 0.2, "; tuning ends in at most 1 s"),
        (True, -3.0, ""),
    ],
)
def test_a_line_says_when_tuning_ends_as_long_as_it_goes_on(tmp_path: Path, over: bool, left: float, says: str) -> None:
    """While the ranks were being ended, "the end is being prepared; tuning ends in at most 0 s" was said."""
    machine: Any = SimpleNamespace(over=over, at_most=left, is_starting=False, in_words="here", ended=(0, 1))
    unused: Any = None
    limits = Limits(
        job=cast(Any, SimpleNamespace(machine=machine)),
        written=unused,
        hosts=unused,
        number=0,
        waiting=Waiting(tmp_path / "none"),
        keeper=0,
        activity="tuning",
        say=print,
        recording=print,
    )
    where = "" if over else f": {limits.waiting.where((0, 1))}"
    assert limits.in_words() == f"here{where}{says}"


HANGS = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for _ in range(3):
    dist.all_reduce(torch.ones(4))
if dist.get_rank():
    dist.recv(torch.ones(4), 0)
dist.barrier()
"""


def test_ranks_that_hang_before_their_steps_are_known_have_an_answer(tmp_path: Path) -> None:
    """Without an optimizer nobody knows yet that the calls are steps: they were recorded for a quarter of an hour."""
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    words = ["diagnose", "--nproc-per-node", "2", str(script)]
    launch = start(with_limits({"attempts.limits._IN_VAIN": 9.0}), tmp_path / "run", words).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    assert "no rank called anything: rank 0 stands in barrier (hangs.py:10)" in " ".join(launch.stdout.split())
    assert launch.processes() == []


FAILS = """
import signal, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for _ in range(30):
    dist.all_reduce(torch.ones(4))
if dist.get_rank() == 0:
    raise ValueError("no more data")
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(12), sys.exit(1)))  # it is slow to end, as on a busy host
time.sleep(60)
"""


def test_ranks_that_are_slow_to_end_when_another_one_has_failed_do_not_hang(tmp_path: Path) -> None:
    """The time until the last of them had gone counted as one in which no rank called anything."""
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    words = ["diagnose", "--diagnose-budget", "1s", "--nproc-per-node", "2", str(script)]
    launch = start(AUTODDP, tmp_path / "run", words).wait()
    assert "no rank called anything" not in launch.stdout
    assert "ValueError: no more data" in " ".join(launch.stdout.split())
    assert launch.processes() == []


IN_SECONDS = "import os, time, torch\ntime.sleep(600 if 'AUTODDP_TUNING' in os.environ else 0)\n"


@pytest.mark.parametrize("script", [IN_SECONDS, whole("print('trained')\n")])
def test_ranks_without_autoddp_are_launched_as_written_in_seconds(script: str, tmp_path: Path) -> None:
    """Nothing told it for half an hour; a script that had ended by then counted as one without DDP."""
    path = tmp_path / "train.py"
    path.write_text(script)
    program = f'BEGIN {{ exit system("exec {sys.executable} -I {path}") }}'  # no shell script, which would be read
    words = ["--nproc-per-node", "2", "--isolation", "off", "--no-python", "awk", program]
    launch = start(with_limits({"attempts.rank_states._BARE": 1.0}), tmp_path / "run", words).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    assert "not tuned, launching as written: autoddp has got into no rank: " in launch.stderr
    assert launch.processes() == []


def beat(folder: Path, rank: int, place: str, still: float = 0.0, waits: float = 0.0) -> None:
    (folder / str(rank)).write_text(encode(Heartbeat(place, still, waits)))


def test_a_rank_for_which_others_wait_is_named_once(tmp_path: Path) -> None:
    now, host = 1000.0, os.uname().nodename
    waiting = Waiting(tmp_path, lambda: now)
    beat(tmp_path, 0, "validate, called in train.py, line 9", 3.0)
    for rank in (1, 2):
        beat(tmp_path, rank, "all_reduce, called in train.py, line 5", 9.0, 8.0)
    assert waiting.for_whom() == ""
    for rank in (1, 2):
        beat(tmp_path, rank, "all_reduce, called in train.py, line 5", 10.0 + rank, 9.0)
    said = "ranks 1, 2 have waited for 12 s for another one: rank 0 is in validate, called in train.py, line 9"
    assert waiting.for_whom() == f"{said} (host {host})"
    assert waiting.for_whom() == ""
    beat(tmp_path, 1, "train.py, line 7")
    beat(tmp_path, 2, "train.py, line 7")
    assert waiting.for_whom() == ""
    beat(tmp_path, 1, "all_reduce, called in train.py, line 5", 15.0, 11.0)
    beat(tmp_path, 2, "all_reduce, called in train.py, line 5", 15.0, 11.0)
    assert waiting.for_whom().startswith("ranks 1, 2 have waited for 15 s for another one: rank 0 is in validate")


def test_a_host_on_which_a_rank_works_is_named(tmp_path: Path) -> None:
    waiting = Waiting(tmp_path, lambda: 1000.0)
    beat(tmp_path, 3, "backward, called in train.py, line 5", 11.0, 8.0)
    assert (
        waiting.for_whom(["node 0 (host0)"])
        == "rank 3 has waited for 11 s for another one: a rank on node 0 (host0) works"
    )
    assert Waiting(tmp_path, lambda: 1000.0).for_whom() == ""  # all wait: that is a hang


def test_of_a_host_that_is_silent_nobody_says_that_it_works(tmp_path: Path) -> None:
    waiting = Waiting(tmp_path, lambda: 1000.0)
    beat(tmp_path, 0, "backward, called in train.py, line 5", 11.0, 8.0)
    line = waiting.for_whom([], {"node 1 (host1)": 11.4})
    assert line == "rank 0 has waited for 11 s for another one: node 1 (host1) has not been heard of for 11 s"


def test_ranks_that_move_and_make_no_step_are_waited_for_for_two_hours(tmp_path: Path) -> None:
    """As where a script looks again and again for a file that never comes while it is tuned."""
    now = 1000.0
    waiting = Waiting(tmp_path, lambda: now)
    for _ in range(71):
        now += 100
        beat(tmp_path, 0, f"train.py, line {now % 7:.0f}")
        assert (waiting.unmoved(), waiting.no_step()) == ("", "")
    now += 101
    said = "the script has made no step within 2 h 0 min, and --budget allows more: rank 0 is in train.py, line "
    assert waiting.no_step().startswith(said)


@pytest.mark.parametrize("jump", [0.0, 86400.0, -86400.0])
def test_movement_starts_the_clock_again(jump: float, tmp_path: Path) -> None:
    """The files' times are the system's, which may jump in between; the clock of the launcher does not."""
    now = 1000.0
    waiting = Waiting(tmp_path, lambda: now)
    beat(tmp_path, 3, "wait")
    written = (tmp_path / "3").stat().st_mtime
    now += 1700
    assert waiting.unmoved() == ""
    beat(tmp_path, 3, "wait")
    os.utime(tmp_path / "3", (written, written + jump + 1))
    now += 1700
    assert waiting.unmoved() == ""
    beat(tmp_path, 3, "wait", 1700.0)
    os.utime(tmp_path / "3", (written, written + jump + 2))
    now += 1700
    assert waiting.unmoved() == ""
    now += 200
    where = f"rank 3 is in wait (host {os.uname().nodename})"
    assert waiting.unmoved() == f"no rank has moved for 31 min 40 s: {where}"
