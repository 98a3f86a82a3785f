"""What a killed script cannot put back: the terminal's settings, and the modes of the standard descriptors.

    before = StandardStreams()
    ...                  # an attempt, which is killed
    before.restore()

All programs on a terminal share its settings, and all that have inherited a descriptor share its mode. A script that
listens to keys switches the echo off, and asyncio makes standard input non-blocking: with it the shell's, and the
standard output of the same terminal. Where standard input is a terminal, a script that is tuned reads another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import termios
from typing import Any

_STANDARD = range(3)


class StandardStreams:
    """The settings and modes now; `restore` makes them as they were.

    If another job of the shell is in the foreground, the settings are that job's and are left alone.
    """

    def __init__(self) -> None:
        self._modes: dict[int, int] = {}
        self._settings: dict[int, list[Any]] = {}
        is_in_foreground = _is_in_foreground()
        for number in _STANDARD:
            with contextlib.suppress(OSError, termios.error):  # it is closed, or no terminal
                self._modes[number] = fcntl.fcntl(number, fcntl.F_GETFL)
                if is_in_foreground:
                    self._settings[number] = termios.tcgetattr(number)

    def restore(self) -> None:
        """Does nothing where nothing has changed."""
        for number, mode in self._modes.items():
            with contextlib.suppress(OSError):
                if fcntl.fcntl(number, fcntl.F_GETFL) != mode:
                    fcntl.fcntl(number, fcntl.F_SETFL, mode)
        if not _is_in_foreground():
            return
        for number, settings in self._settings.items():
            with contextlib.suppress(OSError, termios.error):
                if termios.tcgetattr(number) != settings:
                    _set(number, settings)


def silent_terminal() -> int:
    """A terminal of the same size and settings as that of standard input, on which nobody types: all reading ends.

    It stays one as long as this process lives. /dev/null where there can be none.
    """
    try:
        settings: list[Any] = termios.tcgetattr(0)
        size = fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8))
        settings[3] &= ~termios.ICANON  # else reading would wait for a line; without, for so many letters and so long
        settings[6][termios.VMIN] = settings[6][termios.VTIME] = 0
        _other_end, theirs = os.openpty()
        termios.tcsetattr(theirs, termios.TCSANOW, settings)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
        # To be read only: nobody reads what is written to it, and a writer would wait for that.
        found = os.open(os.ttyname(theirs), os.O_RDONLY | os.O_NOCTTY)
        os.close(theirs)
    except (OSError, termios.error):  # as where this user may have no more of them
        return os.open(os.devnull, os.O_RDONLY)
    return found


def _set(number: int, settings: list[Any]) -> None:
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # it would stop this process, whose group is its own
    try:
        termios.tcsetattr(number, termios.TCSANOW, settings)
    finally:
        signal.signal(signal.SIGTTOU, before)


def _is_in_foreground() -> bool:
    """Whether the command is in its terminal's foreground, or no shell shares the terminal with it.

    The command is the nearest ancestor that has a terminal: this process, and under `--no-orphans` the launcher too,
    have groups or sessions of their own.
    """
    pid = os.getppid()
    while pid > 0:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                _, parent, group, _, terminal, foreground = file.read().rpartition(b")")[2].split()[:6]
        except OSError:  # not Linux, or it has ended
            break
        if terminal != b"0":
            return group == foreground
        pid = int(parent)
    for number in _STANDARD:
        with contextlib.suppress(OSError):
            return os.tcgetpgrp(number) == os.getpgid(os.getppid())
    return True
