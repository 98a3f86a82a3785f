"""CPU time of this process and of all that it has started: unlike a duration, it is the same on a busy machine.

before = of_family()
...
seconds = of_family() - before
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def of_family() -> float:
    """CPU seconds until now of this process, its children, theirs, and those of them that have been waited for.

    A process that was given up by its parent before it ended is not counted. 0.0 where there is no /proc.
    """
    found, family = 0, [str(os.getpid())]
    while family:
        process = Path("/proc", family.pop())
        with contextlib.suppress(OSError):  # it has ended meanwhile
            # utime, stime, cutime and cstime stand 11 fields behind the command, which may hold any character.
            found += sum(map(int, (process / "stat").read_text().rpartition(")")[2].split()[11:15]))
            for thread in (process / "task").iterdir():
                family += (thread / "children").read_text().split()
    return found / _TICKS
