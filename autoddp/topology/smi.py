"""`nvidia-smi`, asked with patience but not for ever: with a broken driver it hangs, and not even a kill ends it."""

from __future__ import annotations

import shutil
import subprocess

_PATIENCE = 10.0  # seconds; a healthy 8-GPU machine needs 2, without persistence mode up to 6


class SmiFailed(Exception):
    """nvidia-smi is not there, failed, or did not answer; the text says which."""


class SmiHangs(SmiFailed):
    """It did not answer: NVML would not either."""


def ask(*words: str, patience: float = _PATIENCE) -> str:
    """What `nvidia-smi <words>` prints, warnings and all; SmiFailed if there is no answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise SmiFailed("there is no nvidia-smi")
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen([program, *words], stdout=pipe, stderr=pipe, stdin=subprocess.DEVNULL)
    except OSError as problem:
        raise SmiFailed(f"nvidia-smi could not be started: {problem.strerror}") from None
    try:
        out, err = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        process.kill()  # and no wait after it: a process in the driver's hands ends when the driver lets it
        raise SmiHangs(f"nvidia-smi did not answer within {patience:g} s") from None
    if process.returncode != 0 and not out.strip():
        said = err.decode(errors="replace").strip().splitlines() or ["nothing"]
        raise SmiFailed(f"nvidia-smi ended with {process.returncode} and said: {said[0][:200]}")
    return out.decode(errors="replace")
