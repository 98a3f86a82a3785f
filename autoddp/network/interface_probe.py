"""A port that answers those who know its secret, and then reads and drops data.

Launchers try each other's addresses with it.

Both sides show that they know the secret without sending it: the client sends a random number and a keyed digest of it,
and the listener sends another keyed digest of the same number. It closes the connections of all others.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

_PATIENCE = 3.0  # seconds for a connection
_STOPPED = 30.0  # seconds for the answer where one stands: its launcher may be stopped, or on a busy machine
_LOOK = 0.1  # seconds between two looks whether an answer has come
_PAUSE = 1.0  # seconds; if more pass between two looks, this process was stopped itself
_TRIES = 3  # in which it was stopped
_AGAIN = 1.5  # seconds after which another connection is begun beside one that has not answered: packets get lost
_AT_ONCE = 250  # addresses tried at the same time, by two connections at most; a process may often have 1024 files open
_BUFFER = 512 * 1024  # bytes that the kernel may hold: on a slow link it sends them after the time is over
_SERVING = 10 * _PATIENCE  # seconds for the next data of a peer that has answered: it may serve many at once
_READ_AT_ONCE, _SENT_AT_ONCE = 2**20, 2**18  # bytes: large, so that the link and not Python limits the rate
_NONCE, _DIGEST = 16, 32  # bytes
_SECRET_BYTES = 16  # 128 bits: nobody guesses it
_STRANGERS = 4096  # connections that have not shown the secret yet, at once: all hosts come together; more are closed
_PORTS_TRIED = 20  # before it listens on all interfaces: another program may have a port on one of the addresses
_STRANGER = "another machine answers there"
_ACCOUNT_BYTES = 8  # for the number of bytes that have arrived, which the listener sends at the end
_BREATH = 0.05  # seconds before the next try where no file could be opened


class Listener:
    """`with Listener(addresses) as listener:` on one free port of these addresses; a thread for each connection.

    It listens on all interfaces where an address is not one of this host's, because the others may still reach this
    host by it (a router may translate it), and where none is given.
    """

    def __init__(self, addresses: Sequence[str] = ()) -> None:
        self.secret = secrets.token_hex(_SECRET_BYTES)
        self._servers = _on_one_port(addresses) or [_everywhere()]
        self.port: int = self._servers[0].getsockname()[1]
        self._strangers = threading.Semaphore(_STRANGERS)

    def __enter__(self) -> Listener:
        for server in self._servers:
            threading.Thread(target=self._accept, args=(server,), name="autoddp-network", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # close alone would leave a thread in accept
            server.close()

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    return
                time.sleep(_BREATH)  # all descriptors are in use: who connects is waiting meanwhile
                continue
            if self._strangers.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            try:
                answer = self._answer(connection)
            finally:
                self._strangers.release()
            if not answer:
                return
            connection.settimeout(_SERVING)
            connection.sendall(answer)
            count, buffer = 0, bytearray(_READ_AT_ONCE)
            while read := connection.recv_into(buffer):
                count += read
            connection.sendall(count.to_bytes(_ACCOUNT_BYTES, "big"))

    def _answer(self, connection: socket.socket) -> bytes:
        """What this listener answers; empty for a stranger. OSError for one that says too little in time."""
        until, said = time.monotonic() + _PATIENCE, b""
        while len(said) < _NONCE + _DIGEST:
            connection.settimeout(max(0.001, until - time.monotonic()))
            read = connection.recv(_NONCE + _DIGEST - len(said))
            said += read
            # All of it counts, however late: this process may have been stopped since it arrived.
            if not read or (len(said) < _NONCE + _DIGEST and time.monotonic() > until):
                return b""
        nonce = said[:_NONCE]
        is_known = hmac.compare_digest(said, nonce + _shown(self.secret, b"client", nonce))
        return _shown(self.secret, b"listener", nonce) if is_known else b""


def _shown(secret: str, who: bytes, nonce: bytes) -> bytes:
    """What `who` sends to show that it knows the secret."""
    return hmac.digest(secret.encode(), who + nonce, "sha256")


def _on_one_port(addresses: Sequence[str]) -> list[socket.socket]:
    """A listening socket for each address, all on one port; empty where that cannot be."""
    for _ in range(_PORTS_TRIED):
        servers: list[socket.socket] = []
        try:
            for address in dict.fromkeys(addresses):
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                port = servers[0].getsockname()[1] if servers else 0
                servers.append(socket.create_server((address, port), family=family))
            return servers
        except OSError as error:
            for server in servers:
                server.close()
            if error.errno != errno.EADDRINUSE:
                return []
    return []


def _everywhere() -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=dual)


@dataclass(frozen=True)
class Door:
    """An address of another launcher's listener."""

    address: str
    port: int
    secret: str

    def greeting(self) -> tuple[bytes, bytes]:
        """What a client says first, and what the right listener answers."""
        nonce = secrets.token_bytes(_NONCE)
        return nonce + _shown(self.secret, b"client", nonce), _shown(self.secret, b"listener", nonce)


def tried(doors: Sequence[Door]) -> list[str]:
    """Connect to all at once, within some seconds: for each door "" or why its listener does not answer there."""

    async def all_of_them() -> list[str]:
        files = os.sysconf("SC_OPEN_MAX")  # as many may be open: `ulimit -n`; below 0 without a limit
        free = asyncio.Semaphore(min(_AT_ONCE, files // 4) if files > 1 else _AT_ONCE)
        return await asyncio.gather(*(_tried(door, free) for door in doors))

    return asyncio.run(all_of_them())


async def _tried(door: Door, free: asyncio.Semaphore) -> str:
    async with free:
        for _ in range(_TRIES):
            why, was_stopped = await _once(door)
            if not (why and was_stopped):
                break
        return why


async def _once(door: Door) -> tuple[str, bool]:
    """ "" or why its listener does not answer, and whether this process was stopped meanwhile."""
    stands = asyncio.Event()
    answer = asyncio.ensure_future(_first_answer(door, stands))
    began = looked = time.monotonic()
    longest = 0.0
    try:
        while not answer.done():
            await asyncio.wait([answer], timeout=_LOOK)
            longest, looked = max(longest, time.monotonic() - looked), time.monotonic()
            if not answer.done() and looked - began > (_STOPPED if stands.is_set() else _PATIENCE):
                mute = f"it takes the connection, and has said nothing for {_STOPPED:.0f} s (is its launcher stopped?)"
                return mute if stands.is_set() else f"no answer within {_PATIENCE:.0f} s", longest > _PAUSE
        return answer.result(), longest > _PAUSE
    except (OSError, EOFError) as error:
        return why_not_connected(error), longest > _PAUSE
    finally:
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)


async def _first_answer(door: Door, stands: asyncio.Event) -> str:
    """What comes of a connection, or of a second one, whichever is first.

    A connection whose SYN is lost sends it again after a second, and then, before Linux 6.5, only after three.
    """
    connections = [asyncio.ensure_future(_answer(door, stands))]
    try:
        if not (await asyncio.wait(connections, timeout=_AGAIN))[0]:
            connections.append(asyncio.ensure_future(_answer(door, stands)))
        ended, _ = await asyncio.wait(connections, return_when=asyncio.FIRST_COMPLETED)
        return ended.pop().result()
    finally:
        for one in connections:
            one.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


async def _answer(door: Door, stands: asyncio.Event) -> str:
    reader, writer = await asyncio.open_connection(door.address, door.port)
    stands.set()
    greeting, right = door.greeting()
    try:
        writer.write(greeting)
        said = await reader.readexactly(len(right))
    except (EOFError, ConnectionError):
        return _STRANGER  # a listener closes the connection of who does not know its secret
    finally:
        writer.close()
    return "" if hmac.compare_digest(said, right) else _STRANGER


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
            greeting, right = door.greeting()
            connection.settimeout(_STOPPED)
            connection.sendall(greeting)
            if not hmac.compare_digest(answers.read(len(right)), right):
                return 0.0  # another machine has this address here
            connection.settimeout(_PATIENCE)
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
