"""CPU threads of this rank: what the script has, who decided it, and turning them."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from autoddp.knobs import Configuration
from autoddp.knobs.computing import THREADS
from autoddp.worker.effect import Effect


class Threads(Effect):
    """Made when torch has just been imported, before the script does anything with it."""

    def __init__(self, given: str | None, pinned: str) -> None:
        """`given` is the variable at the process's start; `pinned` is why the user wants no other number, if so."""
        self._pinned = pinned
        if os.environ.get(THREADS.variable) != given:
            self._pinned = self._pinned or f"the script sets {THREADS.variable}"
        self.as_written = torch.get_num_threads()
        self._before: tuple[int, str | None] | None = None

    def pinned(self) -> str:
        """Why the number must stay as it is, or nothing. Asked when the script has set itself up."""
        if torch.get_num_threads() != self.as_written:
            return self._pinned or "the script sets the number of threads"
        return self._pinned

    def apply(self, configuration: Configuration) -> None:
        """See `Effect`. The launched job is started with the variable, so its configuration says nothing of this."""
        self.turn(THREADS.of(configuration))

    def turn(self, count: int | None) -> None:
        """That many from the next operator on, and in processes started from here on; None: as before the first turn.

        A number that the script has set itself stays until then, as it does in the launched job.
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
            torch.set_num_threads(count)


def most_at_start() -> int:
    """The largest number that the variable can give a process: MKL takes no more threads than there are cores.

    A running process can be given more, with two hardware threads a core. That would be no measure of the launched job.
    """
    takes_all = not torch.backends.mkl.is_available() or os.environ.get("MKL_DYNAMIC", "").lower() in ("false", "0")
    if takes_all or not hasattr(os, "sched_getaffinity"):
        return usable_cpus()
    places = [
        Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in os.sched_getaffinity(0)
    ]
    try:
        return len({place.read_text() for place in places})  # two hardware threads of a core name the same siblings
    except OSError:
        return usable_cpus()


def usable_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
