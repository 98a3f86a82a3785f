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


TWICE = """
import os, signal
from autoddp.processes.signals import signals_end_tuning

with signals_end_tuning():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        print("all is left in order", flush=True)
"""
HEEDED_ONCE = """
import os, signal, time
from autoddp.processes import signals
signals._HEEDED = 0.2

signal.signal(signal.SIGTERM, lambda *_: None)
with signals._ending_if_unheeded([signal.SIGTERM], lambda: 1, "ends"):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)
print("all is left in order", flush=True)
"""


@pytest.mark.parametrize(("program", "code"), [(TWICE, 143), (HEEDED_ONCE, 0)], ids=["both heeded", "one heeded"])
def test_a_signal_that_comes_twice_at_once_is_one(program: str, code: int) -> None:
    """`timeout 1h autoddp train.py` sends each signal twice, and Ctrl-C a third time."""
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (code, "all is left in order\n")
    assert done.stderr.count("\n") == (1 if code else 0)
