"""Once the communication benchmark has been stopped, it starts nothing more; what it has started ends."""

from __future__ import annotations

import argparse
import subprocess
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from autoddp.launch import screening as module
from autoddp.launch.elastic import torchrun_parser
from autoddp.launch.screening import Screening


@pytest.fixture
def torchrun() -> argparse.Namespace:
    return torchrun_parser().parse_args(["--nproc-per-node", "2", "train.py"])


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_nothing_is_started_once_it_was_stopped(
    torchrun: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """`stop` comes before the check, or between the check and the start: then it waits for the process, and ends it."""
    screening = Screening(torchrun, tmp_path, {})
    started: list[subprocess.Popen[bytes]] = []
    stopped = threading.Event()
    genuine = subprocess.Popen

    def start(_command: Any, **more: Any) -> subprocess.Popen[bytes]:
        threading.Thread(target=stop).start()
        started.append(genuine(["sleep", "1000"], **more))
        return started[-1]

    def stop() -> None:
        screening.stop()
        assert all(process.poll() is not None for process in started)
        stopped.set()

    monkeypatch.setattr(module.subprocess, "Popen", start)
    if when == "before":
        screening.stop()
        stopped.set()
    screening._run(["any"], {})
    assert stopped.wait(30)
    assert len(started) == (0 if when == "before" else 1)
    assert not any(psutil.pid_exists(process.pid) for process in started)
    screening._run(["any"], {})
    assert len(started) <= 1
