"""Ports that the script takes while it is tuned, which the job must be able to take again.

When a connection to a port has ended, the system keeps the port for a minute (TIME_WAIT). A server gets it nevertheless
if it asks for that by SO_REUSEADDR, as those of libraries do. One of the user's own that does not ask would be told
"Address already in use" by the job, though nobody has the port.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

from autoddp.isolation.hooks import check_events

_NAME = "port-"
_ENDED, _LISTENS = ("04", "05", "06", "09", "0B"), "0A"
"""States of connections in /proc/net/tcp: those that both programs, or this one, have closed; and of a server."""


def note_ports(folder: str) -> None:
    """From now on leave a file in `folder` for each port that this process takes without SO_REUSEADDR."""

    def binds(taker: Any, address: Any) -> None:
        with contextlib.suppress(Exception):  # what is wrong with the address, the call itself will tell
            is_tcp = taker.family in (socket.AF_INET, socket.AF_INET6) and taker.type == socket.SOCK_STREAM
            if not is_tcp or not address[1] or taker.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR):
                return
            open(os.path.join(folder, f"{_NAME}{address[1]}"), "w").close()

    check_events({"socket.bind": binds})


def noted_ports(folder: str) -> set[int]:
    """The ports that are noted there."""
    with contextlib.suppress(OSError):  # the folder was removed
        names = [name.removeprefix(_NAME) for name in os.listdir(folder)]
        return {int(name) for name in names if name.isdigit()}
    return set()


def ports_kept(noted: set[int]) -> list[int]:
    """The noted ports that nobody has, and that a server would not get now. Linux alone tells of any."""
    states = [(int(place.rpartition(":")[2], 16), state) for place, state in _connections()] if noted else []
    ended = {port for port, state in states if state in _ENDED}
    return sorted(noted & ended - {port for port, state in states if state == _LISTENS})


def _connections() -> Iterator[tuple[str, str]]:
    """Address and state of this host's end of each connection, and of each server, in the kernel's own words."""
    for kind in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{kind}", encoding="ascii") as file:
            for line in list(file)[1:]:
                words = line.split()
                yield words[1], words[3]
