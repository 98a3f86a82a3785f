"""By how much the clocks of two hosts differ, for torch's rendezvous, which compares times that several hosts write.

    with Clock(board).shown():          # on the host that keeps the store, while the hosts gather there
        ...
    ahead = Clock(board).ahead()        # on another host, before it comes to the others

There a host counts as lost if its clock is 15 seconds behind that of another host.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from autoddp.processes.polling import polls

_KEY = "clock"
_EVERY = 0.2  # seconds between two times that are shown
_SHOWN = 5.0  # seconds in which another time must be shown, on a machine that is busy elsewhere
_ALIKE = 3.0  # seconds; less may come from reading the other clock, and does no harm
_LAST = 1.0  # seconds for the last time that is shown


class Clock:
    """The clock of the host that keeps the store; `board` is a store of torch's that all hosts share."""

    def __init__(self, board: Any) -> None:
        self._board = board

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """While the body runs, show this host's time to the others."""
        over = threading.Event()

        def show() -> None:
            with contextlib.suppress(RuntimeError):  # the meeting itself reports what is wrong with the store
                while True:
                    self._board.set(_KEY, str(time.time()))
                    if over.wait(_EVERY):
                        return

        thread = threading.Thread(target=show, name="autoddp-clock", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(_LAST)

    @property
    def was_shown(self) -> bool:
        """Whether the host that keeps the store has shown its time, as every launcher of autoddp there does at once."""
        return bool(self._board.check([_KEY]))

    def ahead(self) -> float:
        """Seconds by which that clock is ahead of this host's; 0.0 if they agree, or if no time is shown."""
        with contextlib.suppress(RuntimeError, ValueError):
            before = self._read()
            for _ in polls(_SHOWN):
                if (said := self._read()) != before:
                    ahead = float(said) - time.time()
                    return ahead if abs(ahead) > _ALIKE else 0.0
        return 0.0

    def _read(self) -> str:
        return self._board.get(_KEY).decode() if self._board.check([_KEY]) else ""
