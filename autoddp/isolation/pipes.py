"""Named pipes whose other end is outside the attempt: what is written to them, or read from them, is gone for good.

Every process of the attempt may use a pipe that the attempt has made. The kernel keeps the time at which a file was
made, so a pipe that is older than the attempt belongs to somebody else.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from autoddp.isolation.hooks import check_events

Stop = Callable[[str], NoReturn]
OTHERS = "a named pipe that is older than this run"
_O_PATH = getattr(os, "O_PATH", 0)


class Pipes:
    """Tells pipes of others from those of the attempt. It must be made before the guard replaces `os.stat`."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._stat = os.stat
        ends = os.pipe()
        self._without_name = os.fstat(ends[0]).st_dev
        for end in ends:
            os.close(end)

    def are_others(self, path: Any) -> bool:
        """Whether `path`, followed as the kernel follows it, is a named pipe that is older than the attempt."""
        try:
            found = self._stat(path)
            # A pipe without a name can be reached by /dev/fd. An attempt inherits none from outside.
            if not stat.S_ISFIFO(found.st_mode) or found.st_dev == self._without_name:
                return False
            return _made(path, found) < self._began
        except (OSError, ValueError, TypeError):
            return False  # the call itself will fail

    def require_own(self, path: Any, flags: int, stop: Stop) -> None:
        """Call `stop` if opening `path` with these flags would open a pipe of others. O_PATH opens nothing."""
        if not flags & _O_PATH and self.are_others(path):
            stop(f"open of {os.fsdecode(path)}, {OTHERS}")


def watch_pipes(pipes: Pipes, stop: Stop) -> None:
    """From now on call `stop` before this process opens a pipe of others. Under guard `guard.audit` does the same."""

    def opened(path: Any, _mode: Any, flags: int) -> None:
        if not isinstance(path, int):
            pipes.require_own(path, flags, stop)

    check_events({"open": opened})


def _made(path: Any, found: os.stat_result) -> float:
    """When a file was made; where the file system does not record that, the oldest of its times."""
    made = getattr(found, "st_birthtime", None)
    if made is None and sys.platform == "linux":
        from autoddp.isolation.kernel.syscalls import birth_time

        made = birth_time(os.fsencode(path))
    return min(found.st_atime, found.st_mtime, found.st_ctime) if made is None else float(made)
