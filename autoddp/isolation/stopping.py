"""How a process of a tuning attempt ends tuning. Needs only the standard library, so that any Python 3 can do it.

Its functions are imported by their names: a script may put others into the modules later, such as sockets of a proxy's.
"""

from __future__ import annotations

from json import dumps
from multiprocessing.connection import Connection
from os import getpid, kill
from signal import SIGKILL
from socket import AF_UNIX
from socket import socket as make_socket
from time import sleep

TYPE_CHECKING = False  # typing's own would import typing, and collections.abc has no subscripts in old Pythons
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

_PATIENCE = 30.0  # seconds to wait until the launcher ends this process


def connected(path: str) -> Connection:
    """A connection to the launcher's Unix socket; OSError where there is none. Not by multiprocessing's `Client`.

    That asks the module `socket` for the class of its socket at each call.
    """
    with make_socket(AF_UNIX) as end:
        end.setblocking(True)  # whatever the script has set by `socket.setdefaulttimeout`
        end.connect(path)
        return Connection(end.detach())


def request(reason: str, overlay_is_to_blame: bool = False) -> bytes:
    """What the launcher is sent to end tuning, as `wire.encode` writes a `StopTuning`.

    Every Python process that the script starts imports this file, and `wire` would cost each of them half as much time
    again.
    """
    message = {"is": "StopTuning", "reason": reason, "overlay_is_to_blame": overlay_is_to_blame}
    return dumps(message).encode()


def stopper(socket: str, overlay_is_to_blame: bool = False) -> Callable[[str], NoReturn]:
    """A function `stop(reason)` that asks the launcher at that Unix socket to end tuning, see `wire.StopTuning`.

    `stop` never returns: the process is killed.
    """

    def stop(reason: str) -> NoReturn:
        # The caller may hold locks, and the script's threads and exit handlers must not go on. So no exception is
        # raised and no code of the script is called; the launcher kills the whole attempt.
        try:
            with connected(socket) as connection:
                connection.send_bytes(request(reason, overlay_is_to_blame))
                connection.recv_bytes()
                sleep(_PATIENCE)
        except (EOFError, OSError):
            pass  # the launcher is gone, and the attempt ends with it
        finally:
            kill(getpid(), SIGKILL)
        raise AssertionError("killed")

    return stop
