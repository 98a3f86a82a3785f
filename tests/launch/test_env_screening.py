"""The communication benchmark: what it sends, and that it starts nothing more once it has been stopped."""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from launchers import FROM_NOTHING, ROOT, environment, forked, wait_for, whole
from traces.room import may_bind

from autoddp.attempts import env_screening as module
from autoddp.attempts.env_screening import Screening
from autoddp.bench.burst import Burst
from autoddp.torchrun.options import torchrun_parser


@pytest.fixture
def torchrun() -> argparse.Namespace:
    return torchrun_parser().parse_args(["--nproc-per-node", "2", "train.py"])


MAY_LEAVE_CORES = "import resource as r; r.setrlimit(r.RLIMIT_CORE, (r.getrlimit(r.RLIMIT_CORE)[1],) * 2)"
"""For a process in which core files are allowed: where they are not, nothing shows who forbids them."""


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark's torchrun is a fork of a process that has imported torch, and so are its ranks: 3 s each."""
    start = f"{MAY_LEAVE_CORES}; import os, sys; os.environ.update({{0}}); sys.argv[0] = {{1!r}}; "
    start += "from {2} import be_torchrun; be_torchrun()"

    def popen(command: list[str], *, env: dict[str, str], start_new_session: bool, **streams: Any) -> Any:
        assert command[:3] == [sys.executable, "-m", module._TORCHRUN]
        # Each other value of such a variable would be a server of its own, which imports torch: see `forks.popen`.
        early = {name: value for name, value in env.items() if name.startswith("PYTHON")}
        usual = {name: value for name, value in environment().items() if name.startswith("PYTHON")}
        words = [sys.executable, "-c", start.format(early, module._TORCHRUN, module._TORCHRUN), *command[3:]]
        rest = {name: value for name, value in env.items() if name not in early}
        return forked(words, env={**rest, **usual}, cwd=".", **streams)

    if FROM_NOTHING not in os.environ:
        more = {"Popen": popen, "TimeoutExpired": subprocess.TimeoutExpired}
        monkeypatch.setattr(module, "subprocess", SimpleNamespace(**more))


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_nothing_is_started_once_it_was_stopped(
    torchrun: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """`stop` comes before the check, or between the check and the start: then it waits for the process, and ends it."""
    env_screening = Screening(torchrun, tmp_path, {})
    started: list[subprocess.Popen[bytes]] = []
    stopped = threading.Event()
    genuine = subprocess.Popen

    def start(_command: Any, **more: Any) -> subprocess.Popen[bytes]:
        threading.Thread(target=stop).start()
        started.append(genuine(["sleep", "1000"], **more))
        return started[-1]

    def stop() -> None:
        env_screening.stop()
        assert all(process.poll() is not None for process in started)
        stopped.set()

    monkeypatch.setattr(module.subprocess, "Popen", start)
    if when == "before":
        env_screening.stop()
        stopped.set()
    env_screening._run(["any"], {})
    assert stopped.wait(30)
    assert len(started) == (0 if when == "before" else 1)
    assert not any(psutil.pid_exists(process.pid) for process in started)
    env_screening._run(["any"], {})
    assert len(started) <= 1


WITHOUT_TREES_FOR_BROADCASTS = """
import os
if "RANK" in os.environ and os.environ.get("NCCL_ALGO") == "Tree":
    import torch.distributed as dist

    def broadcast(*args, **kwargs):
        raise dist.DistBackendError("ncclInvalidUsage: no algorithm/protocol available for function Broadcast")

    dist.broadcast = broadcast
"""


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(("algorithm", "serves"), [("Tree", False), whole("ring,tree;allreduce:tree", True)])
def test_a_setting_under_which_nccl_has_no_broadcast_is_ruled_out(
    torchrun: argparse.Namespace, tmp_path: Path, algorithm: str, serves: bool
) -> None:
    """DDP begins with a broadcast, so the script's job would end there; under gloo, which refuses as NCCL 2.24 does."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TREES_FOR_BROADCASTS)
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    env_screening = Screening(torchrun, tmp_path / "screening", {**os.environ, "PYTHONPATH": paths})
    seconds = env_screening._seconds(Burst.of_step(4096, "gloo"), {"NCCL_ALGO": algorithm})
    assert bool(seconds) is serves


@pytest.mark.usefixtures("forks")
def test_variables_that_are_torchruns_options_are_the_jobs_alone(torchrun: argparse.Namespace, tmp_path: Path) -> None:
    """By the first, its ranks would meet on all interfaces; by the second, nothing could be started at all."""
    variables = {**os.environ, "PET_STANDALONE": "1", "PET_NO_PYTHON": "1"}
    assert Screening(torchrun, tmp_path / "screening", variables)._seconds(Burst.of_step(4096, "gloo"), {})


LOOKS = """
import os, resource
if "RANK" in os.environ:
    limit, traces = resource.getrlimit(resource.RLIMIT_CORE)[0], os.environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT")
    with open(os.path.join(os.environ["SEEN"], os.environ["RANK"]), "w") as file:
        file.write(f"{limit} {traces}")
"""


@pytest.mark.usefixtures("forks")
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no NCCL")
def test_a_setting_that_hangs_leaves_nothing_in_the_users_folders(torchrun: argparse.Namespace, tmp_path: Path) -> None:
    """Nothing isolates it. NCCL's watchdog would write its last calls to the cache, and abort with a core file."""
    (tmp_path / "sitecustomize.py").write_text(LOOKS)
    (seen := tmp_path / "seen").mkdir()
    before = resource.getrlimit(resource.RLIMIT_CORE)
    exec(MAY_LEAVE_CORES)
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONPATH": paths, "SEEN": str(seen)}
    try:
        assert Screening(torchrun, tmp_path / "screening", variables)._seconds(Burst.of_step(4096, "gloo"), {})
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)
    assert {file.read_text() for file in seen.iterdir()} == {"0 0"}


HANGS = """
import os, time
if "RANK" in os.environ:
    open(os.path.join(os.path.dirname(__file__), os.environ["RANK"]), "w").close()
    time.sleep(1000)
"""
LAUNCHER = """
import os, sys
from pathlib import Path
from autoddp.attempts.env_screening import Screening
from autoddp.bench.burst import Burst
from autoddp.torchrun.options import torchrun_parser

torchrun = torchrun_parser().parse_args(["--nproc-per-node", "2", "train.py"])
environment = {**os.environ, "PYTHONPATH": os.pathsep.join([sys.argv[2], os.environ["PYTHONPATH"]])}
Screening(torchrun, Path(sys.argv[1]), environment)._seconds(Burst.of_step(4096, "gloo"), {})
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel tells nobody of a parent's end")
def test_it_ends_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """It is no attempt, so the keeper does not know it. Its ranks would keep the GPUs."""
    (tmp_path / "sitecustomize.py").write_text(HANGS)
    words = [sys.executable, "-c", LAUNCHER, str(tmp_path / "screening"), str(tmp_path)]
    with subprocess.Popen(words, env=environment()) as launcher:
        below: list[psutil.Process] = []
        try:
            # Not when the second rank is just being forked: torchrun does not know it yet, and could not end it.
            wait_for(lambda: all((tmp_path / rank).exists() for rank in "01"), "two ranks")
            below = _below(launcher.pid)
            launcher.kill()
            launcher.wait()
            wait_for(lambda: not any(map(_runs, below)), "the end of the benchmark")
        finally:
            for process in (*below, psutil.Process(launcher.pid)) if launcher.poll() is None else below:
                with contextlib.suppress(psutil.Error):
                    process.kill()


DEAD = """
import os, subprocess, sys, time
from autoddp.attempts import communication, env_screening

base, ends = sys.argv[1:]
env_screening._ENDING = communication._ENDING = 0.2
looks = f"import os; os.listdir({base!r} + '/dead')"
stuck = subprocess.Popen([sys.executable, "-c", looks], start_new_session=True)
while not os.path.exists(f"{base}/dead.asked"):
    time.sleep(0.01)
{"benchmark": env_screening.Screening._end, "replay": communication._end}[ends](stuck)
print("it ended" if stuck.poll() is not None else "killed in vain")
"""


@pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK) or not may_bind(), reason="needs root and FUSE")
@pytest.mark.parametrize("ends", ["benchmark", "replay"])
def test_nobody_waits_for_a_job_that_cannot_be_killed(ends: str, tmp_path: Path) -> None:
    (tmp_path / "dead").mkdir()
    words = [str(ROOT / "tests/dead_mount.py"), str(tmp_path / "dead"), sys.executable, "-c", DEAD, str(tmp_path), ends]
    run = subprocess.run(
        [sys.executable, *words], env=environment(PYTHONPATH=str(ROOT)), capture_output=True, timeout=30
    )
    assert (run.stdout, run.returncode) == (b"killed in vain\n", 0), run.stderr


def _below(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
