"""What a process of a tuning attempt says before it ends tuning is a message of the protocol, though not made by it."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing.connection import Listener
from pathlib import Path

import pytest

from autoddp.wire import StopTuning, decode

PROGRAM = """
import sys
from autoddp.isolation.stopping import stopper
assert not {"msgspec", "autoddp.wire"} & set(sys.modules), "each process that the script starts would pay for it"
stopper(sys.argv[1], overlay_is_to_blame=sys.argv[2] == "True")(sys.argv[3])
"""


@pytest.mark.parametrize("overlay", [False, True])
@pytest.mark.parametrize("reason", ["rm deletes /data/ck.pt", "rm deletes /data/\udcff.pt", 'a "quote"\n'])
def test_the_launcher_understands_it(tmp_path: Path, reason: str, overlay: bool) -> None:
    with Listener(str(tmp_path / "s"), family="AF_UNIX") as launcher:
        words = [sys.executable, "-c", PROGRAM, str(tmp_path / "s"), str(overlay), reason]
        with subprocess.Popen(words) as process, launcher.accept() as connection:
            assert decode(connection.recv_bytes()) == StopTuning(reason, overlay)
        assert process.returncode == -9
