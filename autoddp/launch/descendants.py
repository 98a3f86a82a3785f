"""Ending every process below this one, also those whose parents have ended: for a process that adopts orphans."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import psutil

_ENDING = 10.0  # seconds in which every process must be gone after SIGKILL
_LOOKS = 0.05  # seconds between two looks at what still runs: each reads /proc of every process
_KILLS = 0.01  # seconds between two rounds of SIGKILL: in between a process may have started another
_NAMED = 8  # processes that are named in a line


def collect() -> dict[int, int]:
    """Collect the children that have ended: process id → status, as `os.waitpid` gives it."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended.update([child])
    return ended


def gone_within(seconds: float) -> bool:
    """Wait for the end of every process below this one; whether all have ended in time."""
    until = time.monotonic() + seconds
    while any(True for _ in _running()):
        if time.monotonic() > until:
            return False
        time.sleep(_LOOKS)
    return True


def named_descendants(but: int | None) -> str:
    """The processes below this one by name and id, for a line; "" if there is none. `but`: one that is left out."""
    found = [f"{process.name()} ({process.pid})" for process in _running() if process.pid != but]
    more = len(found) - _NAMED
    return ", ".join(found[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def terminate_descendants() -> None:
    """Send SIGTERM to every process below this one, also to those that are stopped."""
    for process in list(_running()):
        with contextlib.suppress(psutil.Error):
            process.terminate()
            process.resume()


def kill_descendants() -> None:
    """Kill every process below this one; returns once they are gone, or after ten seconds."""
    until = time.monotonic() + _ENDING
    while time.monotonic() < until:
        below = psutil.Process().children(recursive=True)
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()
        collect()
        if not below:
            return
        time.sleep(_KILLS)


def _running() -> Iterator[psutil.Process]:
    """Every process below this one that has not ended."""
    collect()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ends at this moment
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process
