"""A signal ends tuning also while the main thread waits in a call that heeds none."""

from __future__ import annotations

import platform
import signal
import subprocess
import sys

import pytest
from launchers import environment

# Torch waits like that for a store that does not answer. glibc writes a 2 into a locked mutex for which a thread waits.
WAITS = """
import ctypes, threading, time
from autoddp.processes import signals
signals._HEEDED = 0.5

def tell():
    while mutex.raw[0] != 2:
        time.sleep(0.01)
    print("waits", flush=True)

with signals.signals_end_tuning():
    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex)
    threading.Thread(target=tell, daemon=True).start()
    lock(mutex)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
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
    assert said == "autoddp: SIGTERM: tuning ends, no job is started\n"
