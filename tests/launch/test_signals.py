"""A signal ends tuning also while the main thread waits in a call that heeds none."""

from __future__ import annotations

import signal
import subprocess
import sys

from launchers import environment

# Torch waits like that for a store that does not answer.
WAITS = """
import ctypes
from autoddp.launch import signals
signals._HEEDED = 0.5
with signals.signals_end_tuning():
    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex)
    print("waits", flush=True)
    lock(mutex)
"""


def test_a_main_thread_that_cannot_be_interrupted() -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", WAITS], env=environment(), text=True, **pipes) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waits\n"
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 143
    assert said == "autoddp: SIGTERM: ended, no job is started\n"
