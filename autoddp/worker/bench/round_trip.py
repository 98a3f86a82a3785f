"""Measures the round trip of a small message between two nodes over plain TCP: the latency of the network alone.

An all-reduce of a few bytes takes several round trips, and additional time in which its threads wake each other.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time
from collections.abc import Sequence

from autoddp.timing import median
from autoddp.topology import interfaces
from autoddp.topology.nccl.interface_names import named, preferred
from autoddp.worker.process.rank_store import RankStore

SIZE = 256  # bytes
_COUNT = 2000  # messages: on a fast network they take a tenth of a second, and they give a steady median
_MOST_SECONDS = 3.0  # limit for all messages, on a slow network
_FIRST = 10  # the first tenth of the messages does not count, because the connection is still warming up
_PATIENCE = 10.0  # seconds to connect
_GREETING = 1.0  # seconds in which a client must have said the secret
_SECRET = 16  # bytes


def round_trip(ranks: RankStore, nodes: Sequence[Sequence[int]]) -> float | None:
    """Seconds of a round trip between the first ranks of the first two nodes; all ranks must call this together.

    All ranks get the same value: None on one node, and where no plain TCP connection can be made.
    """
    if len(nodes) < 2:
        return None
    mine: float | None = None
    if ranks.rank == 0:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        with socket.create_server(("", 0), family=family, dualstack_ipv6=dual) as server:
            secret = secrets.token_hex(_SECRET)
            ranks.share([_address(), server.getsockname()[1], secret])
            serve(server, secret)
    else:
        address, port, secret = ranks.share(None)
        if ranks.rank == nodes[1][0]:
            mine = measure(address, port, secret)
    found = ranks.gather([mine])
    told: float | None = ranks.share(found[nodes[1][0]][0] if found else None)
    return told


def _address() -> str:
    """The address of the interface that a variable names for the gradients, else that by which ranks found rank 0."""
    addresses = {nic.name: nic.addresses[0] for nic in interfaces() if nic.addresses}
    chosen = preferred(named(os.environ, addresses))
    return addresses[chosen[0]] if chosen else os.environ["MASTER_ADDR"]


def serve(server: socket.socket, secret: str) -> None:
    """Accept the client that knows the secret and send back what it sends. Connections of others are closed."""
    until = time.monotonic() + _PATIENCE
    while (left := until - time.monotonic()) > 0:
        server.settimeout(left)
        try:
            connection, _ = server.accept()
            with connection:
                if _knows(connection, secret):
                    return _echo(connection)
        except OSError:
            continue  # nobody came in time, or the connection broke


def _knows(connection: socket.socket, secret: str) -> bool:
    """Whether the client says the secret soon."""
    until, said = time.monotonic() + _GREETING, b""
    while len(said) < len(secret) and (left := until - time.monotonic()) > 0:
        connection.settimeout(left)
        part = connection.recv(len(secret) - len(said))
        if not part:
            break
        said += part
    return hmac.compare_digest(said, secret.encode())


def _echo(connection: socket.socket) -> None:
    connection.settimeout(_PATIENCE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while part := connection.recv(65536):
        connection.sendall(part)


def measure(address: str, port: int, secret: str) -> float | None:
    """Median seconds of a round trip without the first messages; None if there is no connection."""
    message = bytes(SIZE)
    found: list[float] = []
    try:
        with socket.create_connection((address, port), _PATIENCE) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(secret.encode())
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
