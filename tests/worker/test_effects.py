"""What a trial measures is what the job is launched with: each configuration is driven through both, and compared."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from effect_checks import NOT_HERE, OF_SCRIPT
from launchers import environment, holds_numa_nodes, may_mount, whole

from autoddp.knobs import KNOBS, Configuration
from autoddp.knobs.env import START_KNOBS

CASES = [(script, name) for script, of_script in OF_SCRIPT.items() for name in of_script]
NOT_ON_A_CPU = {knob.name for knob in START_KNOBS} - {"interfaces", "malloc"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of what `effect_checks.py` has found. The machine seems to have two NUMA nodes, where that can be arranged."""
    folder = tmp_path_factory.mktemp("effects")
    cpus = sorted(os.sched_getaffinity(0))
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(holds_numa_nodes(folder / "numa", *map(str, cpus[:2]))) if may_mount() else None
        words = [str(Path(__file__).with_name("effect_checks.py")), str(folder)]
        checks = forks.popen(words, env=environment(**variables, OMP_NUM_THREADS="1"), host=host)
        try:
            assert checks.wait(290) == 0  # half a minute, on a busy machine many times that
        finally:
            checks.kill()
    return folder


def read(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def in_both(folder: Path, script: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """In effect in the trial, and in the job."""
    of_trial, of_job = read(folder, f"trial {script}")[name], read(folder, f"job {script} {name}")
    for found in (of_trial, of_job):
        found["environment"].pop("MASTER_PORT")
        found["environment"].pop("_", None)  # bash's
    return of_trial, of_job


@pytest.mark.parametrize(("script", "name"), CASES)
def test_a_trial_and_the_job_have_the_same_in_effect(folder: Path, script: str, name: str) -> None:
    of_trial, of_job = in_both(folder, script, name)
    assert of_trial == of_job


@pytest.mark.parametrize(("script", "name"), CASES)
def test_turning_back_leaves_nothing(folder: Path, script: str, name: str) -> None:
    found = read(folder, f"trial {script}")
    assert found[f"after {name}"] == found["before"]


@pytest.mark.parametrize(("script", "name"), CASES)
def test_a_configuration_has_an_effect(folder: Path, script: str, name: str) -> None:
    """Else the two tests above would say nothing."""
    found = read(folder, f"trial {script}")
    if name == "binding" and not may_mount():
        pytest.skip("needs root, mounts of its own (unshare -m) and two CPUs")
    if name != "no view":
        assert found[name] != found["before"]


def test_what_a_script_sets_after_construction_stays(folder: Path) -> None:
    for found in in_both(folder, "registers torch's hook", "bf16"):
        (model,) = found["models"]
        assert (model["torch's hook"], model["hooks"]) == ("BuiltinCommHookType.FP16_COMPRESS", [])
    for found in in_both(folder, "sets a static graph", "cap"):
        (model,) = found["models"]
        assert model["plain"]["static_graph"] is True
        assert model["plain"]["_ddp_sink_clone"] is False


@pytest.mark.parametrize(("script", "name"), CASES)
def test_what_a_script_saves_is_as_without_autoddp(folder: Path, script: str, name: str) -> None:
    """Whole objects too: no hook of ours, and the script's own arguments, for whoever loads the file."""
    written = read(folder, f"as written {script}")
    for found in in_both(folder, script, name):
        assert found["saved"] == written


@pytest.mark.parametrize("asked", [1024, whole(1)])  # each is a process that imports torch
def test_no_more_threads_are_tried_than_a_start_can_give(asked: int) -> None:
    """MKL takes no more than there are cores, whatever the variable says; a running process can be given more."""
    counted = (
        "import torch; from autoddp.worker.effects.threads import most_at_start; "
        "print(most_at_start(), torch.get_num_threads())"
    )
    variables = {**environment(), "OMP_NUM_THREADS": str(asked)}
    done = subprocess.run([sys.executable, "-c", counted], env=variables, capture_output=True, text=True, check=True)
    most, given = map(int, done.stdout.split())
    assert given == min(asked, most) or (given > most and not torch.backends.mkl.is_available())


TRAINS_IN_A_THREAD = """
is_over = threading.Event()
def pins():
    torch.set_num_threads(1)
    is_over.wait()
def trains():
    print(repr(threads.pinned()))
    torch.set_num_threads(1)
    print(repr(threads.pinned()))
of_both = [threading.Thread(target=pins), threading.Thread(target=trains)]
for one in of_both:
    one.start()
of_both[1].join()
is_over.set()
"""
WRITES, SETS = "'the script sets OMP_NUM_THREADS'", "'the script sets the number of threads'"
# What the script does before it imports torch, and after it; why the number must stay then.
SCRIPTS_THREADS = {
    "nothing": ("", "", "''"),
    "a default": ("os.environ.setdefault('OMP_NUM_THREADS', '1')", "", "''"),  # the launched job's value stays there
    "the variable": ("os.environ['OMP_NUM_THREADS'] = '1'", "", WRITES),
    "around an import": ("os.environ['OMP_NUM_THREADS'] = '1'; del os.environ['OMP_NUM_THREADS']", "", WRITES),
    "the same number": ("", "torch.set_num_threads(1)", SETS),
    "another number": ("", "torch.set_num_threads(2)", SETS),
    "in another thread": (
        "",
        "x = threading.Thread(target=torch.set_num_threads, args=(1,)); x.start(); x.join()",
        "''",
    ),
    "in the thread that trains, as under Ray": ("", TRAINS_IN_A_THREAD, f"''\n{SETS}\n''"),
}
IN_FORKS = """
import json, os, sys, threading
import torch
from autoddp.worker.effects.threads import Threads
from autoddp.worker.process.bootstrap import notice_writes
torch.set_num_threads(1)  # as OpenMP would have found it out
for before, after, _ in json.loads(sys.argv[1]).values():
    if os.fork() == 0:
        given, is_written = os.environ.get("OMP_NUM_THREADS"), notice_writes("OMP_NUM_THREADS")
        exec(before)
        threads = Threads("" if is_written() else given, "")
        threads.watch()
        exec(after)
        print(repr(threads.pinned()), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
    print("--", flush=True)
"""


@pytest.fixture(scope="module")
def pinned() -> dict[str, str]:
    """What is said of each script, by a fork for each."""
    done = forks.run(["-c", IN_FORKS, json.dumps(SCRIPTS_THREADS)], env=environment(OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr
    return dict(zip(SCRIPTS_THREADS, done.stdout.split("\n--\n"), strict=False))


@pytest.mark.parametrize("script", SCRIPTS_THREADS)
def test_a_number_of_threads_that_the_script_sets_is_not_tuned(script: str, pinned: dict[str, str]) -> None:
    """Also where it is the one that torchrun gives: the script would set it again in the launched job."""
    assert pinned[script] == SCRIPTS_THREADS[script][2]


def test_every_knob_is_driven() -> None:
    driven = {
        knob for of_script in OF_SCRIPT.values() for values in of_script.values() for knob in Configuration(values)
    }
    not_here = NOT_HERE | {knob.name for knob in KNOBS if knob.needs and knob.needs[0] in NOT_HERE}
    expected = {knob.name for knob in KNOBS} - NOT_ON_A_CPU - not_here
    assert expected - driven == {"powersgd_start_step"}  # trials overrule it
