"""Which variables the present start of the script has, which ones the study wants, and how a start that hangs ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_SETTLING = 10.0  # seconds in which the study must have said what it wants next
_START_PATIENCE = 120.0  # seconds for a start with other variables, or five times the first one


class Starts:
    """Shared by the study's thread, which asks, and the main thread, which starts the script.

    A start is *stale* once the study wants other variables than it has.
    """

    def __init__(self) -> None:
        self.wanted: dict[str, str] = {}
        self._present: dict[str, str] = {}
        self._began = time.monotonic()
        self._first = 0.0
        self.listening = threading.Event()
        """Set while the study's thread waits for the job."""

    @property
    def stale(self) -> bool:
        """Whether the present start is of no more use."""
        return self.wanted != self._present

    @property
    def has_variables(self) -> bool:
        """Whether the present start has variables that the study wanted."""
        return bool(self._present)

    def begin(self) -> None:
        """Main thread: another start, with what is wanted now."""
        self._present = dict(self.wanted)
        self._began = time.monotonic()

    def ready(self) -> None:
        """The present start can measure."""
        self._first = self._first or time.monotonic() - self._began

    def settle(self, over: Callable[[], bool]) -> None:
        """Main thread, after a start: wait until the study has heard of it and knows what it wants next, or is over."""
        until = time.monotonic() + _SETTLING
        while not over() and not self.listening.wait(0.05) and time.monotonic() < until:
            pass

    @property
    def hangs(self) -> bool:
        """Whether a start with variables of its own takes so long that its variables must be to blame."""
        patience = max(_START_PATIENCE, 5 * self._first)
        return bool(self._present) and not self.stale and time.monotonic() - self._began > patience

    @property
    def why_hung(self) -> str:
        """For the journal."""
        set_to = " ".join(f"{name}={value}" for name, value in self._present.items())
        return f"the script did not get going with {set_to}"
