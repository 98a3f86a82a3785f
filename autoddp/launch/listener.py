"""A port that answers with a secret and then swallows data: what launchers use to try each other's addresses."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from types import TracebackType

_PATIENCE = 3.0  # seconds for a connection; a lost SYN is sent again after one
_MEASURED = 0.25  # seconds of sending
_BUFFER = 512 * 1024  # bytes in the kernel's hands at most: on a slow link they are sent after the time is over
_SECRET_BYTES = 16
_ACCOUNT_BYTES = 8


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

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
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
            connection.settimeout(10 * _PATIENCE)
            connection.sendall(self.secret.encode())
            count, buffer = 0, bytearray(1 << 20)
            while read := connection.recv_into(buffer):
                count += read
            connection.sendall(count.to_bytes(_ACCOUNT_BYTES, "big"))


def reaches(address: str, port: int, secret: str) -> bool:
    """Whether the listener with that secret answers there."""
    try:
        with _connected(address, port, secret):
            return True
    except OSError:
        return False


def send_rate(address: str, port: int, secret: str) -> float:
    """Bytes per second that the listener takes; 0.0 if the connection breaks."""
    try:
        with _connected(address, port, secret) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            block, sent, began = bytes(1 << 18), 0, time.perf_counter()
            while time.perf_counter() - began < _MEASURED:
                sent += connection.send(block)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(10 * _PATIENCE)
            _read(connection, _ACCOUNT_BYTES)  # the listener has it all
            return sent / (time.perf_counter() - began)
    except OSError:
        return 0.0


def _connected(address: str, port: int, secret: str) -> socket.socket:
    connection = socket.create_connection((address, port), timeout=_PATIENCE)
    try:
        if _read(connection, 2 * _SECRET_BYTES) != secret.encode():
            raise ConnectionRefusedError("somebody else has this address here")
    except OSError:
        connection.close()
        raise
    return connection


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionResetError("closed too early")
        data += part
    return data
