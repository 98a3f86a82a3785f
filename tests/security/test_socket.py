"""The workers' socket: who is not a worker of this user ends only a connection, whatever it sends."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from pathlib import Path

import pytest
from launchers import wait_for
from other_user import as_another_user, needs_root

from autoddp.attempts.job import live_job as module
from autoddp.attempts.job.events import Closed, Said, StopAsked
from autoddp.attempts.job.live_job import WorkerServer
from autoddp.wire import LARGEST, VERSION, Goodbye, Hello, StopTuning, decode, encode

HELLO = encode(Hello(VERSION, 0, 0, 1, 0))
Event = Said | Closed | StopAsked


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, queue.SimpleQueue[Event]]]:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    server = WorkerServer(str(tmp_path / "s"), 0, events.put)
    yield server._path, events
    server.close()


def connected(path: str) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(60)
    peer.connect(path)
    return peer


def framed(data: bytes) -> bytes:
    return struct.pack("!i", len(data)) + data


def serving() -> int:
    """Connections that the server is busy with."""
    return sum(thread.name == "autoddp-serve" for thread in threading.enumerate())


def is_hung_up(peer: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        return peer.recv(1) == b""
    return True


def a_worker_gets_through(path: str, events: queue.SimpleQueue[Event]) -> bool:
    worker: Connection = Client(path, family="AF_UNIX")
    worker.send_bytes(HELLO)
    while True:
        event = events.get(timeout=60)
        if isinstance(event, Said) and isinstance(event.message, Hello):
            return True


HOSTILE = {
    "a request of the web": b"GET / HTTP/1.1\r\n\r\n",
    "no size": b"\xff" * 64,
    "a size of four gigabytes": struct.pack("!iQ", -1, 2**32),
    "a negative size": struct.pack("!i", -2),
    "too long": struct.pack("!i", LARGEST) + b"x" * 2**20,
    "a pickle": framed(b"\x80\x04cposix\nsystem\n(X\x04\x00\x00\x00exitt R."),
    "nested without end": framed(b"[" * 2**19),
    "a number without end": framed(b"9" * 2**19),
    "a worker with no process": framed(HELLO.replace(b'"pid": 1', b'"pid": -1')),
    "a worker with all processes": framed(HELLO.replace(b'"pid": 1', b'"pid": 0')),
    "another message first": framed(encode(Goodbye(0, ""))),
    "a surplus field": framed(HELLO[:-1] + b', "x": 1}'),
    "text for a number": framed(HELLO.replace(b'"rank": 0', b'"rank": "0"')),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_foreign_message_ends_its_connection_alone(name: str, served: tuple[str, queue.SimpleQueue[Event]]) -> None:
    path, events = served
    with connected(path) as peer:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            peer.sendall(HOSTILE[name])
        assert is_hung_up(peer)
    assert events.empty()
    assert a_worker_gets_through(path, events)


@pytest.mark.parametrize("begun", [b"", struct.pack("!i", 100), framed(HELLO)[:-1]], ids=["silent", "size", "half"])
@pytest.mark.parametrize("known", [False, True])
def test_half_a_message_ends_its_connection_alone(
    known: bool, begun: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may be silent for long; a stranger may not."""
    monkeypatch.setattr(module, "_REST", 1)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    server = WorkerServer(str(tmp_path / "s"), 0, events.put)
    with connected(str(tmp_path / "s")) as peer:
        peer.sendall((framed(HELLO) if known else b"") + begun)
        if known and not begun:
            peer.settimeout(2)
            with pytest.raises(TimeoutError):
                peer.recv(1)
        else:
            assert is_hung_up(peer)
        monkeypatch.undo()  # a worker may be as slow as it is
        assert a_worker_gets_through(str(tmp_path / "s"), events)
    server.close()


def test_many_connections_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 5)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    server = WorkerServer(str(tmp_path / "s"), 0, events.put)
    path = str(tmp_path / "s")
    silent = [connected(path) for _ in range(5)]
    for _ in range(20):
        with connected(path) as one_too_many:
            assert is_hung_up(one_too_many)
    assert serving() <= 5
    for one in silent:
        one.close()
    for _ in range(20):
        with connected(path) as stranger:
            with contextlib.suppress(BrokenPipeError):  # the server has not seen yet that those before it have gone
                stranger.sendall(b"x" * 8)
            assert is_hung_up(stranger)
    wait_for(lambda: serving() == 0, "the end of all connections")
    assert a_worker_gets_through(path, events)
    server.close()


def test_where_no_thread_can_be_started_a_connection_ends(served: tuple[str, queue.SimpleQueue[Event]]) -> None:
    """Its worker would wait for an answer for ever, and so would all that come later."""
    path, events = served
    before = threading.stack_size(1 << 46)  # more than there is
    try:
        assert is_hung_up(connected(path))
    finally:
        threading.stack_size(before)
    assert a_worker_gets_through(path, events)


def test_any_process_of_the_script_may_ask_for_the_end(served: tuple[str, queue.SimpleQueue[Event]]) -> None:
    path, events = served
    asking: Connection = Client(path, family="AF_UNIX")
    asking.send_bytes(encode(StopTuning("\x1b[2J" + "a" * 5000)))
    assert isinstance(events.get(timeout=60), StopAsked)
    decode(asking.recv_bytes())


@needs_root
def test_another_user_is_hung_up_on_wherever_the_socket_is(open_folder: Path) -> None:
    """Its folder keeps others out; the kernel's word for who the peer is holds where the folder does not."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    path = str(open_folder / "s")
    server = WorkerServer(path, 0, events.put)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600

    def tries() -> str:
        try:
            with connected(path) as peer:
                with contextlib.suppress(ConnectionError):
                    peer.sendall(framed(HELLO))
                return "hung up" if is_hung_up(peer) else "served"
        except PermissionError:
            return "refused"

    assert as_another_user(tries) == "refused"
    os.chmod(path, 0o777)
    assert as_another_user(tries) == "hung up"
    assert events.empty()
    assert a_worker_gets_through(path, events)
    server.close()
