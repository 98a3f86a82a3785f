"""Child processes: forking them, how they ended, and ending every process below this one.

A process that adopts orphans also finds those whose parents have ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Iterator

import psutil

from autoddp.errors import UNHEARD
from autoddp.processes.polling import polls

_ENDING = 10.0  # seconds in which every process must be gone after SIGKILL
_stuck: set[int] = set()
"""Children that were killed and have not ended."""
_KILLS = 0.01  # seconds between two rounds of SIGKILL: a process may have started another one in between
_NAMED = 8  # processes that are named in a line


def fork() -> int:
    """`os.fork`, with nothing left in the buffers that both processes would write."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads: numpy's, which wait for work, and which the child does not need.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


ENDED_WELL = "ended with exit code 0"
"""What `how_ended` says of a process that has not failed."""


def how_ended(code: int) -> str:
    """ "killed by SIGABRT" or "ended with exit code 1"; `code` is as `os.waitstatus_to_exitcode` gives it."""
    if code == UNHEARD:
        return "could not reach the launcher, as after a change of its user or where it may open no more files"
    if code >= 0:
        return f"ended with exit code {code}"
    names = {one.value: one.name for one in signal.Signals}  # those between SIGRTMIN and SIGRTMAX have none
    return f"killed by {names.get(-code, f'signal {-code}')}"


def collect() -> dict[int, int]:
    """Collect the children that have ended: process id → status, as `os.waitpid` gives it."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended.update([child])
    _stuck.difference_update(ended)
    return ended


def collect_orphans(but: int) -> None:
    """Collect the adopted processes that have ended, and not the child `but`, whose id must stay its own.

    Where a process of the script waits for the end of another one that is not its child, it looks for its id.
    """
    if sys.platform != "linux":  # elsewhere nothing is adopted
        return
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != but:
            os.waitpid(ended.si_pid, os.WNOHANG)
            _stuck.discard(ended.si_pid)


def gone_within(seconds: float) -> bool:
    """Wait for the end of every process below this one; whether all have ended in time."""
    return any(not list(_running()) for _ in polls(seconds))


def named_descendants(but: int | None) -> str:
    """The processes below this one by name and id, for a line; "" if there is none. `but`: one that is left out."""
    found = []
    for process in _running():
        with contextlib.suppress(psutil.Error):  # it ends at this moment
            found += [f"{process.name()} ({process.pid})"] if process.pid != but else []
    more = len(found) - _NAMED
    return ", ".join(found[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def descendants() -> list[int]:
    """The ids of all processes below this one, also of those that have ended and are not collected."""
    return [process.pid for process in _below()]


def terminate_descendants() -> None:
    """Send SIGTERM to every process below this one, also to those that are stopped."""
    for process in list(_running()):
        with contextlib.suppress(psutil.Error):
            process.terminate()
            process.resume()


def kill_child(child: int, patience: float = _ENDING) -> int | None:
    """Kill a child of this process and collect it: its status, as `os.waitpid` gives it.

    None if it does not end within `patience` seconds: a process that waits for a dead file system cannot be killed.
    Nothing waits for it then.
    """
    os.kill(child, signal.SIGKILL)  # its id is still its own if it has ended, because it was not collected
    for _ in polls(patience, _KILLS):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
    _stuck.add(child)
    return None


def has_loaded(library: str, above: int) -> bool:
    """Whether a process has loaded a library of that name that a child of process `above` has started, or one below.

    False where the kernel does not tell, as outside Linux.
    """
    with contextlib.suppress(psutil.Error):  # one of them ends at this moment
        for process in (one for child in psutil.Process(above).children() for one in child.children(recursive=True)):
            with contextlib.suppress(OSError), open(f"/proc/{process.pid}/maps", "rb") as maps:
                if library.encode() in maps.read():
                    return True
    return False


def kill_if_below(pid: int) -> None:
    """Kill the process of this number if it is one below this process."""
    for process in _below():
        with contextlib.suppress(psutil.Error):  # it is gone, or another user's
            if process.pid == pid:
                process.kill()


def kill_descendants() -> None:
    """Kill every process below this one; returns once they are gone, or after ten seconds."""
    for _ in polls(_ENDING, _KILLS):
        below = [process for process in _below() if process.pid not in _stuck]
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()
        collect()
        if not below:
            return


def _running() -> Iterator[psutil.Process]:
    """Every process below this one that has not ended."""
    collect()
    for process in _below():
        with contextlib.suppress(psutil.Error):  # it ends at this moment
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process


def _below() -> list[psutil.Process]:
    """Every process below this one, also those that have ended and are not collected.

    psutil's own way fails where /proc keeps other users' processes to itself (`hidepid=1`), or all that is not about a
    process (`subset=pid`).
    """
    with contextlib.suppress(psutil.Error, OSError):
        return list(psutil.Process().children(recursive=True))
    found: dict[int, list[psutil.Process]] = {}
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            found.setdefault(process.ppid(), []).append(process)
    below = found.pop(os.getpid(), [])
    for process in below:  # which grows meanwhile
        below += found.pop(process.pid, [])
    return below
