"""Finds the program of an attempt that waits for the other end of a named pipe: under the overlay it has none.

waits_at(process, pipes.are_others)    # "" or the path of the pipe
"""

from __future__ import annotations

import platform
from collections.abc import Callable

from autoddp.isolation.kernel.seccomp import HeldCall

_OPEN = {"x86_64": {257: 1, 2: 0}, "aarch64": {56: 1}}
"""Processor → number of a system call that opens a file → which of its arguments is the path."""
_WAITS = ("wait_for_partner", "pipe_wait")
"""Functions of the kernel in which a process waits that opens a named pipe; the second one before Linux 5.9."""


def waits_at(process: int, are_others: Callable[[str], bool]) -> str:
    """The named pipe of others that a process is about to open and waits for; "" if there is none.

    Other files are not looked at: one on a file system that does not answer would make this wait, too. OSError if the
    process has ended, or must not be looked at.
    """
    with open(f"/proc/{process}/wchan", encoding="ascii", errors="replace") as file:
        if file.read() not in _WAITS:
            return ""
    with open(f"/proc/{process}/syscall", encoding="ascii") as file:
        number, *arguments = file.read().split()  # "running", if it goes on by now
    place = _OPEN.get(platform.machine(), {}).get(int(number)) if number.isdecimal() else None
    if place is None:
        return ""
    call = HeldCall(0, process, "open", tuple(int(argument, 16) for argument in arguments))
    path = call.text(call.arguments[place])
    seen = f"/proc/{process}/root{path}" if path.startswith("/") else f"/proc/{process}/cwd/{path}"
    return path if are_others(seen) else ""
