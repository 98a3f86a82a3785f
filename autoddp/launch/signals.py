"""What a signal does before the real job: tuning ends and no job is started. A second one ends the process at once.

Once the real job is started, torchrun's own handlers are in place.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator

from autoddp.log import tell

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""The signals that end a job, unless `--signals-to-handle` names others."""
NOT_FOR_THE_KEEPER = (*ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
"""What schedulers send to every process of a job, and terminals to those that are not in their foreground."""
_SHOW_THE_CURSOR = b"\x1b[?25h"  # a spinner on a terminal hides it


class Interrupted(SystemExit):
    """A signal has come; the exit code is 128 plus its number, such as 130 for Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.name = signal.Signals(number).name
        """Such as SIGINT."""


@contextlib.contextmanager
def signals_end_tuning(numbers: Iterable[int] = ENDING) -> Iterator[None]:
    """Main thread only. Meanwhile the first signal raises `Interrupted`; then the former handlers come back."""
    interrupted = False

    def ended(number: int, _: object) -> None:
        nonlocal interrupted
        if interrupted:
            with contextlib.suppress(OSError):
                if os.isatty(2):
                    os.write(2, _SHOW_THE_CURSOR)
            os._exit(128 + number)  # the keeper ends the attempt and removes its folders
        interrupted = True
        with contextlib.suppress(RuntimeError):  # the signal came while this thread wrote a line itself
            tell(f"{signal.Signals(number).name}: tuning ends, no job is started")
        raise Interrupted(number)

    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]  # as under nohup
    before = {number: signal.signal(number, ended) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
