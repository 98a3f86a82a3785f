"""The round trip of `autoddp bench`: strangers on its port get nothing, and hold nobody up."""

from __future__ import annotations

import socket
import threading
import time

from autoddp.worker.bench.round_trip import measure, serve


def test_a_stranger_is_closed_and_the_client_is_served() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server, "a" * 32))
        thread.start()
        port = server.getsockname()[1]
        for words in (b"", b"b" * 32, b"a" * 31):
            with socket.create_connection(("127.0.0.1", port), 20) as stranger:
                stranger.sendall(words)
                began = time.monotonic()
                assert stranger.recv(1) == b""
                assert time.monotonic() - began < 10
        found = measure("127.0.0.1", port, "a" * 32)
        assert found is not None
        assert 0 < found < 1
        thread.join(20)
        assert not thread.is_alive()
