"""A launcher that is ended by a second signal leaves the terminal's cursor to be seen."""

import os
import pty
import signal
import sys
import time
from pathlib import Path

from launchers import wait_for

from autoddp.processes.signals import ONE_SIGNAL

SCRIPT = """
import os, signal, sys, time
from rich.console import Console
from autoddp.processes.signals import signals_end_tuning

with signals_end_tuning():
    Console(stderr=True).status("waiting").start()
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        open("first", "w").close()
        while True:
            time.sleep(60)
"""


def test_the_second_signal_shows_the_cursor(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"PYTHONPATH": str(Path(__file__).parents[2]), "TERM": "xterm"}
        os.chdir(tmp_path)
        os.execv(sys.executable, [sys.executable, "script.py"])
    wait_for((tmp_path / "first").exists, "the first signal")
    time.sleep(2 * ONE_SIGNAL)
    os.kill(pid, signal.SIGINT)
    shown = b""
    while True:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # the process has ended
            break
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert b"\x1b[?25l" in shown
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
