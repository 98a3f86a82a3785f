"""What a signal does before the real job: tuning ends and no job is started. A second one ends the process at once.

The real job has torchrun's own signal handlers.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from autoddp.log import tell

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Interrupted(SystemExit):
    """A signal has come; the exit code is 128 and its number, such as 130 for Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.name = signal.Signals(number).name
        """Such as SIGINT."""


@contextlib.contextmanager
def signals_end_tuning() -> Iterator[None]:
    """Main thread only. Meanwhile the first signal raises `Interrupted` there; the handlers before come back."""
    interrupted = False

    def ended(number: int, _: object) -> None:
        nonlocal interrupted
        if interrupted:
            _show_the_cursor()
            os._exit(128 + number)  # the keeper ends the attempt and removes its folders
        interrupted = True
        with contextlib.suppress(RuntimeError):  # this thread was just about to write a line itself
            tell(f"{signal.Signals(number).name}: tuning ends, no job is started")
        raise Interrupted(number)

    heeded = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]  # not under nohup
    before = {number: signal.signal(number, ended) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show_the_cursor() -> None:
    """On a terminal, where a display that waits may have hidden it."""
    with contextlib.suppress(OSError):
        if os.isatty(2):
            os.write(2, b"\x1b[?25h")
