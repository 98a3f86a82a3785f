"""A small message there and back over plain TCP: what a link's latency is without any library.

ping_pong.py --serve 5000                                         # on one host; ends with its first client
ping_pong.py --to 10.77.0.1 5000 --bytes 256 --count 2000         # on the other; prints seconds of a round trip
"""

from __future__ import annotations

import argparse
import json
import socket
import time


def receive(connection: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes, or fewer at the end of the connection."""
    found = b""
    while len(found) < size and (part := connection.recv(size - len(found))):
        found += part
    return found


def serve(port: int) -> None:
    """Send everything back as it comes."""
    with socket.create_server(("", port)) as server:
        connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while part := connection.recv(65536):
            connection.sendall(part)


def connect(address: str, port: int) -> socket.socket:
    """To a server that may still be starting."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def round_trips(address: str, port: int, size: int, count: int) -> list[float]:
    """Seconds of each, after a tenth as many to warm up."""
    message, found = bytes(size), []
    with connect(address, port) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count + count // 10):
            began = time.perf_counter()
            connection.sendall(message)
            receive(connection, size)
            found.append(time.perf_counter() - began)
    return found[count // 10 :]


def main() -> None:
    """One side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", type=int, metavar="PORT")
    parser.add_argument("--to", nargs=2, metavar=("ADDRESS", "PORT"))
    parser.add_argument("--bytes", type=int, default=256)
    parser.add_argument("--count", type=int, default=2000)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve)
    elif args.to is not None:
        print(json.dumps(round_trips(args.to[0], int(args.to[1]), args.bytes, args.count)))
    else:
        parser.error("--serve or --to")


if __name__ == "__main__":
    main()
