"""What Python sends by sockets, beneath all libraries: protocols that no other check knows, and datagrams.

The first bytes of a connection that the script has opened tell its protocol. The rule, first match decides:

    1  from a library that is checked by its operations, unless it
       is HTTP to this machine                                       passes
    2  TLS, SSH, SOCKS, whose libraries are checked, and HTTP/2      passes; what goes into TLS is looked at before
       of httpx
    3  HTTP                                                          as `requests` says
    4  to a server that the attempt runs itself                      passes
    5  to a Unix socket                                              passes, except D-Bus and the system's log
    6  everything else: metrics, log records, WebSockets, protocols  ends tuning
       of the user's own

A datagram passes to what the attempt runs itself, and to servers of names and of the time. Connecting alone passes.
Not promised: native code that uses the network by itself is not seen.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import sys
import weakref
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

from autoddp.isolation.elsewhere.own import is_here, receives, runs_peer
from autoddp.isolation.elsewhere.patch import Stop
from autoddp.isolation.elsewhere.requests import is_own, is_this_machine, sends
from autoddp.isolation.hooks import check_events, when_imported

_CHECKED = (
    "http.client",
    "ftplib",
    "smtplib",
    "imaplib",
    "poplib",
    "paramiko",
    "asyncssh",
    "smbprotocol",
    "paho.mqtt",
    # Debuggers, which talk to the user's editor.
    "pydevd",
    "_pydevd_bundle",
    "debugpy",
)
"""Modules whose operations `clients`, `storage` and `requests` check, so that their reads pass."""
_DNS, _NTP = 53, 123
ANSWERS = (_DNS, _NTP)
"""Ports of servers that only answer."""
_LIBRARY_IS_CHECKED = re.compile(rb"\x16\x03|SSH-|\x05[\x01-\x05][\x00-\x09]|\x04\x01")
"""TLS, SSH, and a proxy's SOCKS, beneath which one of these or HTTP follows."""
_HTTP_2 = b"PRI * HTTP/2"
_OF_HTTPX = ("httpcore", "httpcore2")
"""Modules of httpx, whose requests are checked before they are packed; what grpclib or urllib3-future packs is not."""
_OF_PYTHON = ("http.client",)
_REQUEST = re.compile(rb"([A-Z]{3,12}) (\S+) HTTP/1\.[01]\r?\n")
_HOST = re.compile(rb"\r?\nhost:[ \t]*([^\r\n]*)", re.IGNORECASE)
_WEB_SOCKET = re.compile(rb"\r?\nupgrade:[ \t]*websocket", re.IGNORECASE)
_SERVICES = ((re.compile(rb"\0?AUTH "), "calls a service by D-Bus"), (re.compile(rb"<\d{1,3}>"), "writes to the log"))
_ADDRESS = re.compile(r"[\d.]+|[\da-f:.]*:[\da-f:.]*")
_LOOKED_AT = 4096  # bytes
_INTERRUPTED = 100  # times at most that signals interrupt a connection


def watch_sockets(stop: Stop) -> None:
    """Watch from the imports of `socket` and `ssl` on, and by audit events."""
    judge = _Judge(stop)
    check_events({"socket.connect": judge.connects, "syslog.syslog": judge.logs})
    when_imported("socket", functools.partial(_patch_sockets, judge))
    when_imported("ssl", functools.partial(_patch_tls, judge))


class _Judge:
    """Remembers which sockets still have to be looked at."""

    def __init__(self, stop: Stop) -> None:
        self.stop = stop
        self._opened: weakref.WeakSet[Any] = weakref.WeakSet()
        """Sockets that this process has connected, until what they send has passed."""
        self._passed: weakref.WeakSet[Any] = weakref.WeakSet()
        """TLS connections of which the first bytes have passed."""
        self._targets: set[Any] = set()
        """Addresses to which datagrams pass."""

    def connects(self, connection: Any, _address: Any) -> None:
        """Note a connection, for the audit event."""
        if isinstance(connection, socket.socket):
            self._opened.add(connection)

    def logs(self, *_record: Any) -> None:
        """Stop the script, for the audit event of syslog."""
        self.stop("the script writes to the log of this machine (syslog)")

    def before_send(self, connection: Any, data: Any) -> None:
        """Called before a connected socket sends; `data` is empty where it is not known."""
        if connection not in self._opened:
            return
        try:
            peer = connection.getpeername()
        except OSError:  # not connected, or not any more: the call itself will fail
            return
        if connection.type == socket.SOCK_DGRAM:
            self._datagram(connection, peer)
        elif connection.family == _UNIX:
            # Each request is looked at: only the path tells the server, and the libraries' checks do not know it.
            self._require(_unix_stream(connection, _beginning(data)))
            return
        elif connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
            own = functools.partial(_is_own_peer, connection, peer)
            self._require(_stream(_beginning(data), own, f"{peer[0]}:{peer[1]}", peer[1]))
            if is_this_machine(peer[0]) and _called_by(_OF_PYTHON):
                return  # each request is looked at: the library keeps the connection open for further ones
        self._opened.discard(connection)

    def before_sendto(self, connection: Any, address: Any) -> None:
        """Called before a socket without a connection sends to an address."""
        if connection.type == socket.SOCK_DGRAM:
            self._datagram(connection, address)

    def before_tls(self, connection: Any, data: Any) -> None:
        """Called before a TLS connection gets data that is not encrypted yet."""
        if connection.server_side or connection in self._passed:
            return
        host = connection.server_hostname or ""
        if hasattr(connection, "getpeername"):
            try:
                peer = connection.getpeername()
            except OSError:
                return
            own = functools.partial(_is_own_peer, connection, peer) if connection.family != _UNIX else lambda: True
            where = f"{host or peer[0]}:{peer[1]}"
        else:  # asyncio: the connection below is not known here

            def own() -> bool:
                return is_this_machine(host)

            where = host or "another machine"
        self._require(_stream(_beginning(data), own, where, 443))
        self._passed.add(connection)

    def _datagram(self, connection: Any, address: Any) -> None:
        if address in self._targets:
            return
        where = ""
        if connection.family == _UNIX:
            if not receives(os.fsdecode(address)):
                where = os.fsdecode(address).replace("\0", "@")
        elif connection.family in (socket.AF_INET, socket.AF_INET6):
            host, port = address[:2]
            if port not in ANSWERS and not (_is_here(connection, host) and receives(port)):
                where = f"{host}:{port}"
        if where:
            self.stop(f"the script sends datagrams to {where}")
        self._targets.add(address)

    def _require(self, said: str) -> None:
        if said:
            self.stop(said)


_UNIX = getattr(socket, "AF_UNIX", None)


def _is_here(connection: Any, host: str) -> bool:
    """Whether a socket would reach this machine at `host`."""
    if is_this_machine(host):
        return True
    return _ADDRESS.fullmatch(host) is not None and is_here(connection.family, host)


def _is_own_peer(connection: Any, peer: Any) -> bool:
    here = connection.getsockname()
    if peer[1] in ANSWERS:
        return True
    if is_this_machine(peer[0]) or peer[0] == here[0]:
        return runs_peer(peer[1], here[1])
    return is_own(peer[0], peer[1])


def _stream(data: bytes, own: Callable[[], bool], where: str, port: int) -> str:
    """ "" if a connection over a network that begins with this data may be, else what it does."""
    request = _REQUEST.match(data)
    named = _HOST.search(data) if request else None
    host = named[1].decode("latin-1").partition(":")[0] if named else where.rpartition(":")[0]
    is_here = request is not None and is_this_machine(host)
    # Of a request to this machine the library's check may have seen that nobody listens. But somebody has answered now,
    # such as a container to which the kernel passes connections on.
    is_checked = not is_here and _called_by(_OF_HTTPX if data.startswith(_HTTP_2) else _CHECKED)
    if is_checked or _LIBRARY_IS_CHECKED.match(data):
        return ""
    if request is not None and not _WEB_SOCKET.search(data):
        return sends(request[1], host, request[2], port, lambda *at: own() or (not is_here and is_own(*at)))
    if own():
        return ""
    if request is not None:
        return f"the script opens a WebSocket to {where}"
    return f"the script sends data to {where} by a protocol that autoddp does not know"


def _unix_stream(connection: Any, data: bytes) -> str:
    request = _REQUEST.match(data)
    known = next((what for pattern, what in _SERVICES if pattern.match(data)), "")
    if request is None and not known:
        return ""
    path = os.fsdecode(connection.getpeername())
    if runs_peer(path):
        return ""
    if request is None:
        return f"the script {known} ({path})"
    return sends(request[1], path, request[2], is_own=lambda *_: False)


def _called_by(modules: tuple[str, ...]) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if any(name == each or name.startswith(f"{each}.") for each in modules):
            return True
        frame = frame.f_back
    return False


def _beginning(data: Any) -> bytes:
    """The first bytes of what a function of a socket is given: one buffer, or several."""
    if isinstance(data, (list, tuple)):
        return b"".join(map(_beginning, data[:8]))[:_LOOKED_AT]
    try:
        return bytes(memoryview(data).cast("B")[:_LOOKED_AT])
    except (TypeError, ValueError):  # no buffer: the call itself will fail
        return b""


def _patch_sockets(judge: _Judge, module: ModuleType) -> None:
    kind = module.socket

    def checked(name: str, check: Callable[..., None]) -> None:
        original = getattr(kind, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            check(self, *args)
            return original(self, *args, **kwargs)

        setattr(kind, name, call)

    def sends_data(connection: Any, data: Any = b"", *_more: Any) -> None:
        judge.before_send(connection, data)

    def sends_to(connection: Any, *args: Any) -> None:
        if len(args) > 1:  # data, flags if given, address
            judge.before_sendto(connection, args[-1])

    def sends_message(
        connection: Any, buffers: Any = (), _more: Any = (), _flags: int = 0, address: Any = None
    ) -> None:
        if address is None:
            judge.before_send(connection, buffers)
        else:
            judge.before_sendto(connection, address)

    connect = kind.connect

    @functools.wraps(connect)
    def connects(self: Any, address: Any) -> None:
        # A signal may interrupt the call while the kernel holds it (see `seccomp`), before it has begun. Python takes
        # any interrupted call for one that goes on, and this one for done. It has no port then.
        for _ in range(_INTERRUPTED):
            connect(self, address)
            if self.family not in (socket.AF_INET, socket.AF_INET6) or self.getsockname()[1]:
                return

    kind.connect = connects
    checked("send", sends_data)
    checked("sendall", sends_data)
    checked("sendfile", lambda connection, *_: judge.before_send(connection, b""))
    checked("sendto", sends_to)
    checked("sendmsg", sends_message)


def _patch_tls(judge: _Judge, module: ModuleType) -> None:
    for kind, name in ((module.SSLSocket, "send"), (module.SSLSocket, "write"), (module.SSLObject, "write")):
        original = getattr(kind, name)

        def call(self: Any, data: Any, *args: Any, _original: Any = original) -> Any:
            judge.before_tls(self, data)
            return _original(self, data, *args)

        setattr(kind, name, functools.wraps(original)(call))
