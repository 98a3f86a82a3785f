"""What a signal does before the real job: tuning, or a diagnosis, ends. A second one ends the process at once.

Once the real job is started, torchrun's own handlers are in place.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NoReturn

from autoddp.log import tell
from autoddp.processes.polling import polls

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""The signals that end a job, unless `--signals-to-handle` names others."""
NOT_FOR_THE_KEEPER = (*ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
"""What schedulers send to every process of a job, and terminals to those that are not in their foreground."""
_HEEDED = 5.0  # seconds in which the main thread must heed a signal, on a machine that is busy elsewhere
ONE_SIGNAL = 0.3
"""Seconds in which signals are one: `timeout` sends to its command, to its group, and on what a terminal sends both."""
_SHOW_THE_CURSOR = b"\x1b[?25h"  # a spinner on a terminal hides it


class Interrupted(SystemExit):
    """A signal has come; the exit code is 128 plus its number, such as 130 for Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.name = signal.Signals(number).name
        """The signal's name, such as SIGINT."""


@contextlib.contextmanager
def signals_end_tuning(
    numbers: Iterable[int] = ENDING,
    says: str = "tuning ends, no job is started",
    is_heeded: Callable[[int], bool] = lambda number: False,
) -> Iterator[None]:
    """Main thread only. Meanwhile the first signal raises `Interrupted`; then the former handlers come back.

    `says`: what the user is told of a signal, after its name. `is_heeded`: called with the first signal; where it
    returns True, what goes on ends by itself, and nothing is raised.
    """
    came, last = 0, 0.0

    def ended(number: int, _: object) -> None:
        nonlocal came, last
        if came and time.monotonic() - last < ONE_SIGNAL:
            return
        came, last = came + 1, time.monotonic()
        if came > 1:
            _end_now(number)
        with contextlib.suppress(RuntimeError):  # the signal came while this thread wrote a line itself
            tell(f"{signal.Signals(number).name}: {says}")
        if not is_heeded(number):
            raise Interrupted(number)

    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]  # as under nohup
    before = {number: signal.signal(number, ended) for number in heeded}
    try:
        with _ending_if_unheeded(heeded, lambda: came, says):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _ending_if_unheeded(numbers: Collection[int], heeded: Callable[[], int], says: str) -> Iterator[None]:
    """End the process if a signal comes and its handler does not run; `heeded` tells how many have run so far.

    Python runs handlers in the main thread alone, which may wait in torch for a host that does not answer.
    """
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    before = signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        came, last = 0, -ONE_SIGNAL
        while said := woken.recv(1):
            if said[0] not in numbers or time.monotonic() - last < ONE_SIGNAL:
                continue
            came += 1
            for _ in polls(_HEEDED):
                if heeded() >= came:
                    break
            else:
                tell(f"{signal.Signals(said[0]).name}: {says}")
                _end_now(said[0])
            last = time.monotonic()  # not before: of signals that came meanwhile Python may have run one handler

    thread = threading.Thread(target=watch, name="autoddp-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        wakes.shutdown(socket.SHUT_WR)  # to close it is not enough: a child that this process has forked holds it too
        wakes.close()
        thread.join()
        woken.close()


def _end_now(number: int) -> NoReturn:
    """End this process at once. The keeper, which is another process, ends the attempt and removes its folders."""
    with contextlib.suppress(OSError):
        if os.isatty(2):
            os.write(2, _SHOW_THE_CURSOR)
    os._exit(128 + number)
