"""What Python sends by sockets ends tuning unless the attempt runs the other end, or what is sent only asks.

Real servers outside the attempt, and real clients: each case is a fork of one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SERVERS = """
import json, os, signal, socket, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer

class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(204)
        self.end_headers()
    do_GET = do_PUT = do_POST
    def address_string(self): return "somebody"
    def log_message(self, *words): pass
class UnixServer(ThreadingHTTPServer):
    address_family = socket.AF_UNIX
    def server_bind(self):
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = "localhost", 80
def echo(listener):
    def talk(connection):
        with connection:
            while data := connection.recv(99):
                connection.sendall(data)
    while True:
        threading.Thread(target=talk, args=listener.accept()[:1], daemon=True).start()
def serve_one(listener):  # after whom nobody listens any more
    connection, address = listener.accept()
    listener.close()
    Answers(connection, address, None)
def serve(folder):
    os.chdir(folder)
    found = {}
    for name, kind in (("http", ThreadingHTTPServer), ("unixhttp", UnixServer)):
        server = kind(("127.0.0.1", 0) if name == "http" else os.path.abspath("http.sock"), Answers)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found[name] = server.server_port
    for name, family, address in (
        ("tcp", socket.AF_INET, ("127.0.0.1", 0)),
        ("unix", socket.AF_UNIX, os.path.abspath("stream.sock")),
    ):
        listener = socket.socket(family)
        listener.bind(address)
        listener.listen()
        threading.Thread(target=echo, args=(listener,), daemon=True).start()
        found[name] = listener.getsockname()[-1]
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve_one, args=(listener,), daemon=True).start()
    found["one"] = listener.getsockname()[1]
    for name, family, address in (
        ("udp", socket.AF_INET, ("127.0.0.1", 0)),
        ("log", socket.AF_UNIX, os.path.abspath("log.sock")),
        ("blanks", socket.AF_UNIX, os.path.abspath("a log.sock")),
    ):
        listener = socket.socket(family, socket.SOCK_DGRAM)
        listener.bind(address)
        found[name] = listener.getsockname()[-1]
        kept.append(listener)
    return found
kept = []
"""
OUTSIDE = SERVERS + "print(json.dumps(serve(sys.argv[1])), flush=True); sys.stdin.read(); os._exit(0)"
CLIENT = (
    SERVERS
    + """
import time
from autoddp.isolation.elsewhere import watch_clients
from autoddp.isolation.pipes import Pipes
from forked_cases import outcome, stop
watch_clients(stop, Pipes(time.time()), by_kernel=True)
import asyncio, logging.handlers, ssl, http.client, urllib.request
order = json.load(sys.stdin)
os.mkdir("own")
own = serve("own")
os.chdir("..")
def case(side, code):
    signal.alarm(30)  # a case that waits for ever ends by this signal
    at = {"outside": order["outside"], "own": {**own, "http_port": own["http"]}}[side]
    os.chdir(order["folder"] if side == "outside" else "own")
    exec(code, {"__name__": "__main__", **globals(), **at, "http": http, "here": os.getcwd()})
print(json.dumps([outcome(lambda: case(*one)) for one in order["cases"]]))
os._exit(0)
"""
)
CONNECT = "s = socket.create_connection(('127.0.0.1', tcp)); "
UNIX = "s = socket.socket(socket.AF_UNIX); s.connect('stream.sock'); "
UDP = "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
LOG = "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.connect('log.sock'); "
LOG_TO = "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); "
RECORD = "; h.emit(logging.makeLogRecord({'msg': 'x'})); "
NOBODY_LISTENS = """
c = http.client.HTTPConnection("localhost", one)
c.connect()
while True:
    try:
        socket.create_connection(("127.0.0.1", one)).close()
    except OSError:
        break
for request in (("GET", "/x"), ("POST", "/x", b"1")):  # by one connection
    c.request(*request)
    assert c.getresponse().read() == b""
"""
UNIX_HTTP = """
class C(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect("http.sock")
c = C("localhost")
"""
ASYNC = """
async def ask():
    reader, writer = await asyncio.open_connection('127.0.0.1', {port})
    writer.write({data!r})
    await writer.drain()
    return await reader.read(1)
asyncio.run(ask())
"""
WEB_SOCKET = b"GET /chat HTTP/1.1\r\nHost: chat\r\nUpgrade: WebSocket\r\n\r\n"
HTTP_2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

ENDS = {
    "metrics": (CONNECT + "s.sendall(b'loss 1 2\\n')", "the script sends data to 127.0.0.1:"),
    "send": (CONNECT + "s.send(bytearray(b'loss'))", "the script sends data"),
    "sendmsg": (CONNECT + "s.sendmsg([b'loss', b' 1'])", "the script sends data"),
    "sendfile": (CONNECT + "s.sendfile(open(sys.executable, 'rb'))", "the script sends data"),
    "a file of the socket": (CONNECT + "f = s.makefile('wb'); f.write(b'x'); f.flush()", "the script sends data"),
    "the port is not blocking": (
        "s = socket.socket(); s.settimeout(5); s.connect_ex(('localhost', tcp)); s.send(b'x')",
        "the script sends data",
    ),
    "asyncio": (ASYNC.format(port="tcp", data=b"loss"), "the script sends data"),
    "HTTP by hand": (CONNECT + "s.sendall(b'PUT /x HTTP/1.1\\r\\nHost: store\\r\\n\\r\\n')", "sends PUT to store"),
    "HTTP where nobody listens any more": (NOBODY_LISTENS, "sends POST to localhost"),
    "WebSocket": (CONNECT + f"s.sendall({WEB_SOCKET!r})", "the script opens a WebSocket to 127.0.0.1:"),
    "HTTP/2 of a library that nothing checks": (
        CONNECT + f"s.sendall({HTTP_2!r})",
        "the script sends data to 127.0.0.1:",
    ),
    "WebSocket by a library": (
        "import aiohttp\n"
        "async def ask():\n"
        "    async with aiohttp.ClientSession() as session:\n"
        "        await session.ws_connect(f'http://127.0.0.1:{http_port}/chat')\n"
        "asyncio.run(ask())",
        "the script opens a WebSocket",
    ),
    "into TLS": (
        "ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname='store.invalid')"
        ".write(b'secret')",
        "the script sends data to store.invalid",
    ),
    "HTTP/2 into TLS": (
        "ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname='store.invalid')"
        f".write({HTTP_2!r})",
        "the script sends data to store.invalid",
    ),
    "into TLS without a name": (
        "c = ssl.create_default_context(); c.check_hostname = False\n"
        "c.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO()).write(b'secret')",
        "the script sends data to another machine",
    ),
    "POST into TLS": (
        "ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname='store.invalid')"
        ".write(b'POST /x HTTP/1.1\\r\\nHost: store.invalid:8443\\r\\n\\r\\n')",
        "sends POST to store.invalid",
    ),
    "log of another machine": (
        "h = logging.handlers.SocketHandler('127.0.0.1', tcp)" + RECORD,
        "the script sends data",
    ),
    "log by datagrams": ("h = logging.handlers.DatagramHandler('127.0.0.1', udp)" + RECORD, "the script sends datagr"),
    "syslog": ("import syslog; syslog.syslog('x')", "the script writes to the log of this machine"),
    "handler of syslog": (
        "h = logging.handlers.SysLogHandler(os.path.join(here, 'log.sock'))" + RECORD,
        "the script sends datagrams to",
    ),
    "systemd's socket": (LOG + "s.send(b'READY=1')", "the script sends datagrams to /"),
    "datagrams to a relative path": (LOG_TO + "s.sendto(b'x', 'log.sock')", "the script sends datagrams to log.sock"),
    "datagrams to a link": (
        "os.symlink(os.path.abspath('log.sock'), 'link'); " + LOG_TO + "s.sendto(b'x', 'link')",
        "the script sends datagrams to link",
    ),
    "datagrams to a path with blanks": (
        LOG_TO + "s.sendto(b'x', os.path.abspath('a log.sock'))",
        "the script sends datagrams to /",
    ),
    "log by a connection": (UNIX + "s.sendall(b'<14>x\\0')", "the script writes to the log"),
    "D-Bus": (UNIX + "s.sendall(b'\\0AUTH EXTERNAL 30\\r\\n')", "the script calls a service by D-Bus (/"),
    "statsd": (UDP + "s.sendto(b'loss:1|g', ('127.0.0.1', udp))", "the script sends datagrams to 127.0.0.1:"),
    "statsd, connected": (UDP + "s.connect(('localhost', udp)); s.send(b'loss:1|g')", "the script sends datagrams"),
    "datagram with flags": (UDP + "s.sendto(b'x', 0, ('192.0.2.1', 9))", "the script sends datagrams to 192.0.2.1:9"),
    "message": (UDP + "s.sendmsg([b'x'], [], 0, ('192.0.2.1', 9))", "the script sends datagrams to 192.0.2.1:9"),
    "IPv6": (
        "s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM); s.sendto(b'x', ('2001:db8::1', 9))",
        "the script sends datagrams to 2001:db8::1:9",
    ),
    "a manager": (
        "import multiprocessing.managers as m; m.BaseManager(('localhost', tcp), b'key').connect()",
        "multiprocessing connects to localhost (SocketClient)",
    ),
    "HTTP to a Unix socket": (UNIX_HTTP + "c.request('POST', '/containers/x/kill')", "sends POST to /"),
    "HTTP to a Unix socket, kept open": (
        UNIX_HTTP + "c.request('GET', '/x'); c.getresponse().read(); c.request('POST', '/x')",
        "sends POST to /",
    ),
}  # fmt: skip
PASSES = {
    "the address of this machine": UDP + "s.connect(('192.0.2.1', 80)); s.getsockname()",
    "whether a port is open": CONNECT + "s.close()",
    "reads": "urllib.request.urlopen(f'http://127.0.0.1:{http_port}/x').read()",
    "reads by hand": "s = socket.create_connection(('127.0.0.1', http_port));"
    "s.sendall(b'GET /x HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n'); assert s.recv(99)",
    "a server of names": "import struct\n" + UDP + "s.connect(('127.0.0.1', 53))\n"
    "try: s.send(b'x')\nexcept ConnectionError: pass",
    "a server of names, connected": "class S(socket.socket):\n"
    "    def getpeername(self): return ('127.0.0.53', 53)\n"
    "s = S(); s.connect(('127.0.0.1', tcp)); s.sendall(b'x')",
    "a proxy": CONNECT + "s.sendall(b'\\5\\1\\0'); assert s.recv(9) == b'\\5\\1\\0'",
    "an own server at another address": "a = socket.socket(type=socket.SOCK_DGRAM); a.connect(('192.0.2.1', 9))\n"
    "here = a.getsockname()[0]; b = socket.socket(type=socket.SOCK_DGRAM); b.bind((here, 0))\n"
    + UDP
    + "s.sendto(b'x', b.getsockname()); assert b.recv(9) == b'x'",
    "HTTP/2 of httpx": CONNECT
    + f"exec({f's.sendall({HTTP_2!r})'!r}, {{'__name__': 'httpcore._sync.http2', 's': s}}); assert s.recv(9)",
    "a Unix socket": UNIX + "s.sendall(b'anything'); assert s.recv(9) == b'anything'",
    "reads from a Unix socket": UNIX_HTTP + "c.request('GET', '/x'); assert c.getresponse().status == 204",
    "a pair": "a, b = socket.socketpair(); a.sendall(b'x'); assert b.recv(9) == b'x'",
    "a pair of datagrams": "a, b = socket.socketpair(type=socket.SOCK_DGRAM); a.send(b'x'); assert b.recv(9) == b'x'",
    "nothing": CONNECT + "s.shutdown(socket.SHUT_WR); assert s.recv(9) == b''",
    "serves": "kind = HTTPServer(('127.0.0.1', 0), Answers); threading.Thread(target=kind.handle_request).start()\n"
    "assert urllib.request.urlopen(f'http://127.0.0.1:{kind.server_port}/x').status == 204",
    "GET into TLS": "c = ssl.create_default_context()\n"
    "try: c.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname='store.invalid')"
    ".write(b'GET /x HTTP/1.1\\r\\nHost: store.invalid\\r\\n\\r\\n')\nexcept ssl.SSLWantReadError: pass",
    "a manager of its own": "import multiprocessing.managers as m\n"
    "class M(m.BaseManager): pass\nM.register('numbers', list, exposed=['__len__'])\n"
    "with M(('127.0.0.1', 0), b'key', ctx=__import__('multiprocessing').get_context('fork')) as own:\n"
    "    again = M(own.address, b'key'); again.connect(); assert len(again.numbers()) == 0",
    "queues": "import multiprocessing as m\nq = m.get_context('fork').Queue(); q.put(1); assert q.get() == 1",
}
OWN_TOO = (
    "metrics", "send", "sendmsg", "a file of the socket", "the port is not blocking", "asyncio", "HTTP by hand",
    "HTTP/2 of a library that nothing checks",
    "WebSocket", "log of another machine", "log by datagrams", "handler of syslog", "systemd's socket",
    "datagrams to a relative path", "datagrams to a link", "datagrams to a path with blanks",
    "log by a connection", "D-Bus", "statsd", "statsd, connected", "HTTP to a Unix socket",
    "HTTP to a Unix socket, kept open",
)  # fmt: skip
"""Cases that pass where the attempt runs the server itself."""
CASES = {
    **{(name, "outside"): (code, why) for name, (code, why) in ENDS.items()},
    **{(name, side): (code, "") for name, code in PASSES.items() for side in ("outside", "own")},
    **{(name, "own"): (ENDS[name][0], "") for name in OWN_TOO},
}


@cache
def answers() -> dict[tuple[str, str], tuple[int, str]]:
    """What became of each case. A shell stands for the agent, so that the servers outside are not below its parent."""
    import tempfile

    env, pipe = {**os.environ, "PYTHONPATH": f"{HERE.parents[1]}:{HERE}"}, subprocess.PIPE
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        (folder / "outside").mkdir()
        (folder / "attempt").mkdir()
        words = [sys.executable, "-c", OUTSIDE, str(folder / "outside")]
        with subprocess.Popen(words, stdin=pipe, stdout=pipe, env=env, text=True) as outside:
            assert outside.stdout is not None
            ports = json.loads(outside.stdout.readline())
            ports["http_port"] = ports["http"]  # the script's `http` is a package
            cases = [[side, code] for (_, side), (code, _) in CASES.items()]
            order = {"cases": cases, "outside": ports, "folder": str(folder / "outside")}
            words = ["sh", "-c", '"$@"; exit $?', "agent", sys.executable, "-c", CLIENT]
            done = subprocess.run(
                words, input=json.dumps(order), env=env, cwd=folder / "attempt", capture_output=True, text=True,
                timeout=300, check=False,
            )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {key: (code, said) for key, (code, said) in zip(CASES, json.loads(done.stdout), strict=True)}


@pytest.mark.parametrize("key", CASES, ids=", ".join)
def test_what_is_sent(key: tuple[str, str]) -> None:
    why = CASES[key][1]
    if key[0] == "WebSocket by a library":
        pytest.importorskip("aiohttp")
    status, said = answers()[key]
    assert (status, said[: len(why)]) == ((77, why) if why else (0, "")), said
    assert why or not said
