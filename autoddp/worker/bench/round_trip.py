"""A small message there and back between two nodes over plain TCP: the network's latency, without any library's.

An all-reduce of a few bytes takes several of these, and on top of them what its threads need to wake each other.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence

from autoddp.timing import median
from autoddp.topology import interfaces
from autoddp.topology.naming import named, preferred
from autoddp.worker.rank_store import Ranks

SIZE = 256  # bytes
_COUNT = 2000  # messages: on a fast network a tenth of a second, and enough for a steady median
_MOST_SECONDS = 3.0  # for all of them, on a slow network
_FIRST = 10  # one part in so many, at the beginning, does not count: the connection is still warming up
_PATIENCE = 10.0  # seconds to connect


def round_trip(ranks: Ranks, nodes: Sequence[Sequence[int]]) -> float | None:
    """Seconds, the same on every rank, between the first ranks of the first two nodes; all ranks call this together.

    None on one node, and where no plain connection can be made.
    """
    if len(nodes) < 2:
        return None
    mine: float | None = None
    if ranks.rank == 0:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        with socket.create_server(("", 0), family=family, dualstack_ipv6=dual) as server:
            ranks.share([_address(), server.getsockname()[1]])
            _serve(server)
    else:
        address, port = ranks.share(None)
        if ranks.rank == nodes[1][0]:
            mine = _measure(address, port)
    found = ranks.gather([mine])
    told: float | None = ranks.share(found[nodes[1][0]][0] if found else None)
    return told


def _address() -> str:
    """Of the interface that the job's gradients take, if one is named; else the one by which the ranks found rank 0."""
    addresses = {nic.name: nic.addresses[0] for nic in interfaces() if nic.addresses}
    chosen = preferred(named(os.environ, addresses))
    return addresses[chosen[0]] if chosen else os.environ["MASTER_ADDR"]


def _serve(server: socket.socket) -> None:
    """Send everything back as it comes, to one client."""
    server.settimeout(_PATIENCE)
    try:
        connection, _ = server.accept()
    except TimeoutError:
        return
    with connection:
        connection.settimeout(_PATIENCE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while part := connection.recv(65536):
            connection.sendall(part)


def _measure(address: str, port: int) -> float | None:
    """The median, after a tenth as many to warm up."""
    message = bytes(SIZE)
    found: list[float] = []
    try:
        with socket.create_connection((address, port), _PATIENCE) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            deadline = time.perf_counter() + _MOST_SECONDS
            while len(found) < _COUNT and time.perf_counter() < deadline:
                began = time.perf_counter()
                connection.sendall(message)
                left = SIZE
                while left and (part := connection.recv(left)):
                    left -= len(part)
                found.append(time.perf_counter() - began)
    except OSError:
        return None
    return median(found[len(found) // _FIRST :])
