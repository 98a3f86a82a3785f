"""Ends a rank of `autoddp bench` that waits for the others for too long, with a line that says so.

    deadline = Deadline()
    deadline.within(300, "starting")       # from now on; each call replaces the one before
    deadline.within(100, "measuring")
    deadline.cancel()

If a host loses its power or its network, gloo would wait for half an hour and the job's store for two hours.
"""

from __future__ import annotations

import os
import sys
import threading


class Deadline:
    """Ends this process when it takes too long.

    It does so by `os._exit`, because the main thread may wait in a call that cannot be interrupted.
    """

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def within(self, seconds: float, what: str) -> None:
        """The process ends with exit code 1 unless `within` or `cancel` is called in `seconds`."""
        self.cancel()
        self._timer = threading.Timer(seconds, _end, (seconds, what))
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """The process may take as long as it likes."""
        if self._timer is not None:
            self._timer.cancel()


def _end(seconds: float, what: str) -> None:
    rank = os.environ.get("RANK", "0")
    line = (
        f"autoddp bench: rank {rank} is still {what} after {seconds:.0f} s: another rank, its host or the network does "
    )
    sys.stderr.write(f"{line}not answer; see that all hosts are up and can reach each other\n")
    sys.stderr.flush()
    os._exit(1)
