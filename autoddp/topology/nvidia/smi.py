"""Runs nvidia-smi with a time limit: with a broken driver it hangs, and not even SIGKILL ends it."""

from __future__ import annotations

import shutil
import subprocess

_TIME_LIMIT = 10.0  # seconds; a healthy 8-GPU machine needs 2, without persistence mode up to 6


class SmiFailed(Exception):
    """nvidia-smi is not there, failed, or did not answer; the text says which."""


class SmiHangs(SmiFailed):
    """nvidia-smi did not answer in time; NVML would hang too."""


def ask(*words: str, time_limit: float = _TIME_LIMIT) -> str:
    """What `nvidia-smi <words>` prints on stdout, warnings included; SmiFailed if it fails or takes too long."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise SmiFailed("there is no nvidia-smi")
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen([program, *words], stdout=pipe, stderr=pipe, stdin=subprocess.DEVNULL)
    except OSError as problem:
        raise SmiFailed(f"nvidia-smi could not be started: {problem.strerror}") from None
    try:
        out, err = process.communicate(timeout=time_limit)
    except subprocess.TimeoutExpired:
        process.kill()  # without waiting for its end: a process that is blocked in the driver may never end
        raise SmiHangs(f"nvidia-smi did not answer within {time_limit:g} s") from None
    if process.returncode != 0 and not out.strip():
        said = err.decode(errors="replace").strip().splitlines() or ["nothing"]
        raise SmiFailed(f"nvidia-smi ended with {process.returncode} and said: {said[0][:200]}")
    return out.decode(errors="replace")
