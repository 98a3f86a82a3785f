"""Which variables the script is started with, which ones the study wants, and when a start with them hangs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

_START_PATIENCE = 120.0  # seconds for a start with other variables, if the first one was fast
_TIMES = 5  # times the first start's duration; that one filled the caches, so a start that works is no slower


class Starts:
    """A start is *stale* once the study wants other variables than the start has."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.wanted: dict[str, str] = {}
        self._clock = clock
        self._present: dict[str, str] = {}
        self._began = clock()
        self._first = 0.0

    @property
    def stale(self) -> bool:
        """Whether the script has to be started again."""
        return self.wanted != self._present

    @property
    def has_variables(self) -> bool:
        """Whether the present start has variables that the study wanted."""
        return bool(self._present)

    def begin(self, variables: Mapping[str, str]) -> None:
        """Another start begins, with these variables: those that were wanted when all hosts agreed on it."""
        self._present = dict(variables)
        self._began = self._clock()

    def ready(self) -> None:
        """The present start has come to its first measurement."""
        self._first = self._first or self._clock() - self._began

    @property
    def hangs(self) -> bool:
        """Whether a start with the study's variables takes so long that they must be the cause."""
        patience = max(_START_PATIENCE, _TIMES * self._first)
        return bool(self._present) and not self.stale and self._clock() - self._began > patience

    @property
    def why_hung(self) -> str:
        """Why a start of the script hangs, for the journal."""
        set_to = " ".join(f"{name}={value}" for name, value in self._present.items())
        return f"the script did not get going with {set_to}"
