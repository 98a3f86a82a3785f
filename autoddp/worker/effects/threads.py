"""The number of CPU threads of this rank: who has set it, and how it is changed in the running process."""

from __future__ import annotations

import functools
import os
import threading
from pathlib import Path

import torch

from autoddp.cpus import usable_cpus
from autoddp.knobs import Configuration
from autoddp.knobs.computing import THREADS
from autoddp.worker.effects.base import Effect

_set_num_threads = torch.set_num_threads


class Threads(Effect):
    """The knob `threads`. Create it right after torch was imported, before the script uses torch."""

    def __init__(self, given: str | None, pinned: str) -> None:
        """`given`: the variable when the process started. `pinned`: why the user's number must stay, or ""."""
        self._pinned = pinned
        if os.environ.get(THREADS.variable) != given:
            self._pinned = self._pinned or f"the script sets {THREADS.variable}"
        self.as_written = torch.get_num_threads()
        self._before: tuple[int, str | None] | None = None
        self._setters: set[int] = set()
        """Threads of the script that have set the number."""

    def watch(self) -> None:
        """Notice from here on that the script sets the number, also to what it is already.

        torchrun gives each of several ranks one thread, and many scripts ask for one: in the launched job they would
        set the number back to one.
        """

        @functools.wraps(_set_num_threads)
        def set_num_threads(count: int) -> None:
            self._setters.add(threading.get_ident())
            _set_num_threads(count)

        torch.set_num_threads = set_num_threads  # type: ignore[assignment]

    def pinned(self) -> str:
        """Why the number must stay as it is; "" if it may change.

        Call it in the thread that trains, after the script has set itself up. Each thread begins with the main one's
        number. That of any other, such as a loader's that pins memory, is its own alone, also in the launched job.
        """
        script_sets = not self._setters.isdisjoint((threading.get_ident(), threading.main_thread().ident))
        if script_sets or torch.get_num_threads() != self.as_written:
            return self._pinned or "the script sets the number of threads"
        return self._pinned

    def apply(self, configuration: Configuration) -> None:
        """See `Effect`. In the launched job the variable sets the number, so its configuration has no such knob."""
        self.set_count(THREADS.of(configuration))

    def set_count(self, count: int | None) -> None:
        """Use `count` threads in the next operators and in new child processes; None restores the original number.

        The original number is the one before the first call, which the script itself may have set.
        """
        if count is not None:
            self._before = self._before or (torch.get_num_threads(), os.environ.get(THREADS.variable))
            self._set(count, str(count))
        elif self._before is not None:
            self._set(*self._before)
            self._before = None

    @staticmethod
    def _set(count: int, variable: str | None) -> None:
        if variable is None:
            os.environ.pop(THREADS.variable, None)
        else:
            os.environ[THREADS.variable] = variable
        if torch.get_num_threads() != count:
            _set_num_threads(count)


def most_at_start() -> int:
    """The largest number of threads that the variable can give a process: with MKL, the number of cores.

    A running process could use more where a core has two hardware threads. Trials must not, because the launched job
    cannot.
    """
    takes_all = not torch.backends.mkl.is_available() or os.environ.get("MKL_DYNAMIC", "").lower() in ("false", "0")
    if takes_all or not hasattr(os, "sched_getaffinity"):
        return usable_cpus()
    places = [
        Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in os.sched_getaffinity(0)
    ]
    try:
        return len({place.read_text() for place in places})  # the hardware threads of a core list the same siblings
    except OSError:
        return usable_cpus()
