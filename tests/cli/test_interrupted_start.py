"""Ctrl-C before there is anything to end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launchers import SCRIPTS, environment

TORCH = """
import os, signal
if os.path.basename(getattr(__import__("sys"), "argv", [""])[0]) == "__main__.py":
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        pass
"""
"""In place of torch: the signal comes while it is imported."""


@pytest.mark.parametrize("words", [["--nproc-per-node", "2"], ["diagnose"]], ids=["job", "diagnose"])
def test_a_signal_while_torch_is_imported_is_one_line(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    command = [sys.executable, "-m", "autoddp", *words, str(SCRIPTS / "plain.py")]
    env = environment()
    env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "autoddp: SIGINT: ended\n")
