"""HTTP requests, whichever library sends them: what is not clearly a read ends tuning.

The rule, first match decides:

    1  to a server on this machine that the attempt runs itself,
       or to the job's own rendezvous (MASTER_ADDR, MASTER_PORT)     passes
    2  a GET that is known to act (a chat bot's sendMessage)         ends tuning
    3  GET, HEAD, OPTIONS and the like                               passes
    4  a POST known to read or to fetch a token, by the table        passes
    5  an RPC whose name is a read: POST …Service/GetDataset         passes
    6  everything else: PUT, PATCH, DELETE, POST, WebDAV's writes    ends tuning
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import urlsplit

from autoddp.isolation.elsewhere.own import is_here, runs_peer, serves_path, serves_port
from autoddp.isolation.elsewhere.patch import Call, Client, inside_read, words

READING_METHODS = words("GET HEAD OPTIONS TRACE CONNECT PROPFIND REPORT SEARCH QUERY")

ACTING_GETS = (
    ("api.telegram.org", "/bot*/[!g]*"),  # getMe and getUpdates read
    ("*", "*.send"),  # ServerChan and others that are called like it
    ("api.day.app", "*"),
    ("*pushplus.plus", "/send*"),
    ("*.pushdeer.com", "/message/push"),
    ("hc-ping.com", "*"),  # a watch over jobs, which would take the attempt for the job
    ("cronitor.link", "*"),
    ("nosnch.in", "*"),
    ("*", "/api/*/heartbeat/*"),  # Better Stack, which has two names
    ("*", "/api/push/*"),  # Uptime Kuma, on a server of the user's
    ("*", "/ping/*-*-*-*-*"),  # healthchecks likewise: a job by its UUID
    ("maker.ifttt.com", "/trigger/*"),
    ("ntfy.sh", "*/publish"),
    ("ntfy.sh", "*/send"),
    ("ntfy.sh", "*/trigger"),
)
"""Host and path, as patterns, of GETs that send something."""

HARMLESS = (
    # Tokens. The last part of the path says so; a form's login is one as well.
    ("*", "*/token"),
    ("*", "*/access_token*"),
    ("*", "*/login"),
    ("*", "*/login/"),
    ("sts.*amazonaws.com*", "*"),
    ("iamcredentials.googleapis.com", "*:generate*Token"),
    # Reads that are POSTs because the question is long.
    ("*", "/api/*/paths-info*"),  # huggingface_hub, from load_dataset
    ("*", "/api/validate-yaml"),
    ("*", "/api/2.0/mlflow/*/search"),
    ("*", "*/_search"),  # Elasticsearch
    ("*", "*/_count"),
    # A library counts that it was used. It changes nothing that the user owns.
    ("*.google-analytics.com", "*"),
    ("*.posthog.com", "*"),
    ("api.segment.io", "*"),
    ("*.amplitude.com", "*"),
    ("*.mixpanel.com", "*"),
    ("*.scarf.sh", "*"),
)
"""Host and path, as patterns, of POSTs that pass."""

TOKEN_PUTS = (("169.254.169.254", "/latest/api/token"), ("fd00:ec2::254", "/latest/api/token"))
"""Likewise of PUTs: AWS asks so for the role of this machine, with which it then reads."""

_RPC_READ = re.compile(r"[A-Za-z]Service/(Get|List|Describe|Download|Search|Query|Lookup|BatchGet|Read)[A-Z]")
_LOOPBACK = re.compile(r"localhost|.*\.localhost|localhost\.localdomain|127(\.\d+){1,3}|::1|0\.0\.0\.0|::ffff:127\..*")


def is_own(host: str, port: int) -> bool:
    """Whether this is a server of the attempt, or nobody: the user's own servers keep what they are sent.

    Asks no name server.
    """
    host = host.strip("[]").lower().rstrip(".")
    if not host or (host, str(port)) == (os.environ.get("MASTER_ADDR", "").lower(), os.environ.get("MASTER_PORT")):
        return True
    if is_this_machine(host):
        return serves_port(port)
    # Where nobody listens at such an address, the kernel may pass on what comes there, as to a container.
    return _is_address_here(host) and runs_peer(port)


def _is_address_here(host: str) -> bool:
    """Whether this is no name, but an address by which programs reach this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.inet_pton(family, host)
        return is_here(family, host)
    except (OSError, ValueError):  # a name; ValueError: a zero byte in it
        return False


def is_this_machine(host: str) -> bool:
    """Whether this name or address is known to be this machine's, without asking a name server."""
    return host == socket.gethostname().lower() or _LOOPBACK.fullmatch(host) is not None


def sends(method: Any, host: Any, path: Any, port: int = 80, is_own: Callable[[str, int], bool] = is_own) -> str:
    """ "" if this request may go, else what it does: "sends PUT to store.example.com". Takes str and bytes."""
    method, host, path = _text(method).upper(), _text(host).lower(), _text(path).partition("?")[0] or "/"
    if inside_read():
        return ""
    reads = (
        method in READING_METHODS
        or (method == "POST" and (_matches(HARMLESS, host, path) or _RPC_READ.search(path)))
        or (method == "PUT" and _matches(TOKEN_PUTS, host, path))
    )
    if (reads and not _matches(ACTING_GETS, host, path)) or is_own(host, port):
        return ""
    return f"sends {method} to {host}"  # no path: it may hold a password


def _matches(table: tuple[tuple[str, str], ...], host: str, path: str) -> bool:
    return any(fnmatchcase(host, its) and fnmatchcase(path, where) for its, where in table)


def judge_url(method: Any, url: Any) -> str:
    """What `sends` says, for a whole URL."""
    parts = urlsplit(_text(url))
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:  # no number: whoever is given this URL refuses it
        return ""
    return sends(method, parts.hostname or "", parts.path, port)


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _http_client(call: Call) -> str:
    url, method = _text(call.argument("url", default="")), call.argument("method", default="GET")
    if "://" in url:  # a proxy gets the whole URL
        return judge_url(method, url)
    place = "_tunnel_" if getattr(call.owner, "_tunnel_host", None) else ""
    host, port = getattr(call.owner, f"{place}host", ""), getattr(call.owner, f"{place}port", None)
    return sends(method, host, url, port or 80)


def _httpcore(call: Call) -> str:
    request = call.argument("request")
    port = request.url.port or (443 if request.url.scheme == b"https" else 80)
    return sends(request.method, request.url.host, request.url.target, port)


def _method_and_url(call: Call) -> str:
    return judge_url(call.argument("method", default="GET"), call.argument("url", default=""))


def _pycurl(call: Call) -> str:
    """libcurl gets one option at a time; the one that makes the request a write is enough, whatever the host."""
    constants = sys.modules["pycurl"]
    option, value = (*call.args, None, None)[:2]
    writes = [getattr(constants, name, None) for name in ("UPLOAD", "POST", "POSTFIELDS", "HTTPPOST", "MIMEPOST")]
    if option == getattr(constants, "CUSTOMREQUEST", None):
        return "" if str(value).upper() in READING_METHODS else f"sends {value}"
    return "sends data" if option in writes and value else ""


def _grpc(call: Call) -> str:
    method = _text(getattr(call.owner, "_method", "")).rpartition("/")[2]
    target = _text(getattr(call.owner, "_channel", None) and call.owner._channel.target())
    if re.match(r"(Get|List|Describe|Search|Query|Lookup|BatchGet|Read|Check|Watch)", method):
        return ""
    if target.startswith("unix:"):
        host = target.removeprefix("unix:").removeprefix("//")
        own = serves_path(host)
    else:
        host, _, port = target.rpartition("/")[2].removeprefix("ipv4:").removeprefix("ipv6:").rpartition(":")
        own = is_own(host, int(port))
    return "" if own else f"calls {method} on {host}"


REQUESTS = (
    Client("http.client", "http.client", "HTTPConnection.putrequest", judge=_http_client),
    Client(
        "httpx",
        "httpcore._sync.connection_pool httpcore._async.connection_pool "
        "httpcore2._sync.connection_pool httpcore2._async.connection_pool",
        "ConnectionPool.handle_request AsyncConnectionPool.handle_async_request",
        judge=_httpcore,
    ),
    Client("aiohttp", "aiohttp.client_reqrep", "ClientRequest.__init__", judge=_method_and_url),
    Client("tornado", "tornado.httpclient", "HTTPRequest.__init__", judge=_method_and_url),
    Client("curl_cffi", "curl_cffi.requests.session", "Session.request AsyncSession.request", judge=_method_and_url),
    Client("pycurl", "pycurl", "Curl.setopt", judge=_pycurl),
    Client(
        "grpc",
        "grpc._channel",
        "_UnaryUnaryMultiCallable.__call__ .with_call .future _StreamUnaryMultiCallable.__call__ .with_call .future "
        "_UnaryStreamMultiCallable.__call__ _SingleThreadedUnaryStreamMultiCallable.__call__ "
        "_StreamStreamMultiCallable.__call__",
        judge=_grpc,
    ),
    Client(
        "grpc",
        "grpc.aio._channel",
        "UnaryUnaryMultiCallable.__call__ UnaryStreamMultiCallable.__call__ StreamUnaryMultiCallable.__call__ "
        "StreamStreamMultiCallable.__call__",
        judge=_grpc,
    ),
)
"""What sends HTTP, whichever library calls it."""
