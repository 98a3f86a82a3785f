"""CPU threads of this rank while tuning: what the script has, who decided it, and turning them."""

from __future__ import annotations

import os

import torch

from autoddp.knobs.threads import THREADS


class Threads:
    """Made when torch has just been imported, before the script does anything with it."""

    def __init__(self, given: str | None, pinned: str) -> None:
        """`given` is the variable at the process's start; `pinned` is why the user wants no other number, if so."""
        self._pinned = pinned
        if os.environ.get(THREADS.variable) != given:
            self._pinned = self._pinned or f"the script sets {THREADS.variable}"
        self.as_written = torch.get_num_threads()

    def pinned(self) -> str:
        """Why the number must stay as it is, or nothing. Asked when the script has set itself up."""
        if torch.get_num_threads() != self.as_written:
            return self._pinned or "the script sets the number of threads"
        return self._pinned

    def turn(self, count: int | None) -> None:
        """That many from the next operator on; None: as written."""
        wanted = self.as_written if count is None else count
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)


def usable_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
