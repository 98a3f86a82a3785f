"""What NCCL writes while a job is tuned comes to the summary and, where it is not what was predicted, to the user.

No GPU: the script writes what NCCL would, into the file that NCCL would write into, and a program named nvidia-smi
prints the matrix of another machine.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from launchers import AUTODDP, SCRIPTS, start

from autoddp.runs.nccl_logs import transports, variables
from autoddp.topology.facts import Node

MATRIX = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV4\t0-23\t0\nGPU1\tNV4\t X \t0-23\t0\n"
SCRIPT = f"""
import ctypes, os, runpy, socket, sys

name = os.environ["NCCL_DEBUG_FILE"].replace("%h", socket.gethostname()).replace("%p", str(os.getpid()))
me, other = (int(os.environ["RANK"]) ^ i for i in (0, 1))
libc = ctypes.CDLL(None)  # as NCCL writes: Python sees nothing of it
libc.fopen.restype = ctypes.c_void_p
file = libc.fopen(name.encode(), b"w")
text = f"host:1:2 [{{me}}] NCCL INFO Channel 00 : {{me}}[{{me}}] -> {{other}}[{{other}}] via SHM/direct/direct\\n"
libc.fputs(text.encode(), ctypes.c_void_p(file))
libc.fclose(ctypes.c_void_p(file))
sys.path.insert(0, {str(SCRIPTS)!r})
runpy.run_path({str(SCRIPTS / "plain.py")!r}, run_name="__main__")
"""


@pytest.mark.whole
def test_what_nccl_used_stands_beside_the_prediction(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "matrix").write_text(MATRIX)
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\ncat {folder}/matrix\n")
    (folder / "nvidia-smi").chmod(0o755)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "train.py").write_text(SCRIPT)
    words = ["--nproc-per-node", "2", "--trials", "1", "--tune-only", "train.py"]
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "TUNED_TIMES_LONGER": "8"}
    launch = start(AUTODDP, tmp_path / "run", words, env).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    study = json.loads(max(launch.folder.glob(".autoddp/2*/summary.json")).read_text())
    expected = {"between": "GPU0-GPU1", "predicted": "P2P/NVLink", "used": ["SHM"]}
    assert study["transports"]["ways"] == [expected]
    assert launch.stderr.count("NCCL used SHM between GPU0-GPU1, and P2P/NVLink was predicted: look at") == 1


def write_as_nccl(attempt: Path, settings: dict[str, str], transport: str) -> None:
    attempt.mkdir()
    place = variables(attempt, settings)["NCCL_DEBUG_FILE"].replace("%h", "host").replace("%p", "1")
    Path(place).write_text(f"h:1:2 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via {transport}\n")


def test_starts_with_other_settings_say_nothing_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial may have switched peer access off."""
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"):
        monkeypatch.delenv(name, raising=False)
    assert transports(tmp_path, Node("h")) == {}
    write_as_nccl(tmp_path / "attempt0", {}, "P2P/CUMEM")
    write_as_nccl(tmp_path / "attempt1", {"NCCL_P2P_DISABLE": "1"}, "SHM/direct/direct")
    assert transports(tmp_path, Node("h"))["used"] == ["P2P"]
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    assert variables(tmp_path) == {}
