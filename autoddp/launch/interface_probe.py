"""A port that answers with a secret and then reads and drops data: launchers try each other's addresses with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

_PATIENCE = 3.0  # seconds for a connection; a lost SYN is sent again after one
_AT_ONCE = 500  # connections tried at the same time; a process may often have 1024 files open
_BUFFER = 512 * 1024  # bytes that the kernel may hold: on a slow link it sends them after the time is over
_SERVING = 10 * _PATIENCE  # seconds for the next data of a peer that has answered: it may serve many at once
_READ_AT_ONCE, _SENT_AT_ONCE = 2**20, 2**18  # bytes: large, so that the link and not Python limits the rate
_SECRET_BYTES = 16  # 128 bits: nobody answers with it by chance
_ACCOUNT_BYTES = 8  # for the number of bytes that have arrived, which the listener sends at the end


class Listener:
    """`with Listener() as listener:` on a free port of all addresses; a thread per connection, all daemons."""

    def __init__(self) -> None:
        self.secret = secrets.token_hex(_SECRET_BYTES)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
        self.port: int = self._server.getsockname()[1]

    def __enter__(self) -> Listener:
        threading.Thread(target=self._accept, name="autoddp-network", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # close alone would leave a thread in accept
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_SERVING)
            connection.sendall(self.secret.encode())
            count, buffer = 0, bytearray(_READ_AT_ONCE)
            while read := connection.recv_into(buffer):
                count += read
            connection.sendall(count.to_bytes(_ACCOUNT_BYTES, "big"))


@dataclass(frozen=True)
class Door:
    """Where another launcher's listener may be reached."""

    address: str
    port: int
    secret: str


def tried(doors: Sequence[Door]) -> list[str]:
    """Connect to all at once, within some seconds: for each door "" or why its listener does not answer there."""

    async def all_of_them() -> list[str]:
        free = asyncio.Semaphore(_AT_ONCE)
        return await asyncio.gather(*(_tried(door, free) for door in doors))

    return asyncio.run(all_of_them())


async def _tried(door: Door, free: asyncio.Semaphore) -> str:
    async with free:
        try:
            return await asyncio.wait_for(_answer(door), _PATIENCE)
        except (asyncio.TimeoutError, TimeoutError):
            return f"no answer within {_PATIENCE:.0f} s"
        except (OSError, EOFError) as error:
            return why_not_connected(error)


async def _answer(door: Door) -> str:
    reader, writer = await asyncio.open_connection(door.address, door.port)
    try:
        said = await reader.readexactly(2 * _SECRET_BYTES)
    finally:
        writer.close()
    return "" if said == door.secret.encode() else "another machine answers there"


def why_not_connected(error: BaseException) -> str:
    """A connection's failure in a few words."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    number = getattr(error, "errno", None)
    return os.strerror(number).lower() if number and number > 0 else "the connection was closed"


def send_rate(door: Door, lasting: float) -> float:
    """Bytes per second that the listener takes, measured for `lasting` seconds; 0.0 if the connection breaks."""
    try:
        with (
            socket.create_connection((door.address, door.port), timeout=_PATIENCE) as connection,
            connection.makefile("rb") as answers,
        ):
            if answers.read(2 * _SECRET_BYTES) != door.secret.encode():
                return 0.0  # another machine has this address here
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            block, sent, began = bytes(_SENT_AT_ONCE), 0, time.perf_counter()
            while time.perf_counter() - began < lasting:
                sent += connection.send(block)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(_SERVING)
            all_arrived = len(answers.read(_ACCOUNT_BYTES)) == _ACCOUNT_BYTES
            return sent / (time.perf_counter() - began) if all_arrived else 0.0
    except OSError:
        return 0.0
