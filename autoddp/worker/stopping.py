"""How any process of the script ends tuning: it tells the launcher why, and goes no further."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import NoReturn

from autoddp.wire import StopTuning, encode

_PATIENCE = 30.0  # seconds that the launcher has for ending this process


def stopper(socket: str, overlay_is_to_blame: bool = False) -> Callable[[str], NoReturn]:
    """`stop(reason)` for the launcher behind that Unix socket; it never returns. See `wire.StopTuning`."""

    def stop(reason: str) -> NoReturn:
        # The caller may hold locks, and threads and exit handlers of the script must not run on: no exception is
        # raised, and nothing of the script's is called. The launcher kills the whole attempt.
        try:
            with Client(socket, family="AF_UNIX") as connection:
                connection.send_bytes(encode(StopTuning(reason, overlay_is_to_blame)))
                connection.recv_bytes()
                time.sleep(_PATIENCE)
        except (EOFError, OSError):
            pass  # the launcher has gone, and the attempt with it
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")

    return stop
