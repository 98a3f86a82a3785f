"""HTTP requests, whichever library sends them: what is not clearly a read ends tuning.

The rule, first match decides:

    1  to this machine or the job's own rendezvous (MASTER_ADDR)     passes
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
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import urlsplit

from autoddp.isolation.elsewhere.patch import Call, Client, vouched, words

READING_METHODS = words("GET HEAD OPTIONS TRACE CONNECT PROPFIND REPORT SEARCH QUERY")

ACTING_GETS = (
    ("api.telegram.org", "/bot*/[!g]*"),  # getMe and getUpdates read
    ("sctapi.ftqq.com", "*.send"),
    ("api.day.app", "*"),
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
"""Likewise of PUTs: AWS' role of this machine, with which it reads."""

_RPC_READ = re.compile(r"[A-Za-z]Service/(Get|List|Describe|Download|Search|Query|Lookup|BatchGet|Read)[A-Z]")
_LOOPBACK = re.compile(
    r"(localhost|.*\.localhost|localhost\.localdomain|127(\.\d+){1,3}|::1|0\.0\.0\.0|::ffff:127\..*)"
)


def is_here(host: str) -> bool:
    """Whether `host` is this machine or the job's rendezvous. Asks no name server."""
    host = host.strip("[]").lower().rstrip(".")
    return (
        not host
        or _LOOPBACK.fullmatch(host) is not None
        or host in (socket.gethostname().lower(), os.environ.get("MASTER_ADDR", "").lower())
    )


def sends(method: str, host: str, path: str) -> str:
    """ "" if this request may go, else what it does: "sends PUT to store.example.com"."""
    method, host, path = method.upper(), host.lower(), path.partition("?")[0] or "/"
    if is_here(host):
        return ""
    acts = _matches(ACTING_GETS, host, path)
    reads = (
        method in READING_METHODS
        or (method == "POST" and (_matches(HARMLESS, host, path) or _RPC_READ.search(path)))
        or (method == "PUT" and _matches(TOKEN_PUTS, host, path))
    )
    if reads and not acts:
        return ""
    return f"sends {method} to {host}"  # no path: it may hold a password


def _matches(table: tuple[tuple[str, str], ...], host: str, path: str) -> bool:
    return any(fnmatchcase(host, its) and fnmatchcase(path, where) for its, where in table)


def judge_url(method: Any, url: Any) -> str:
    """As `sends`, of a whole URL; bytes are welcome."""
    parts = urlsplit(_text(url))
    return "" if vouched() else sends(_text(method), parts.hostname or "", parts.path)


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _http_client(call: Call) -> str:
    url = _text(call.argument("url", default=""))
    method = call.argument("method", default="GET")
    if "://" in url:  # a proxy is told the whole URL
        return judge_url(method, url)
    host = getattr(call.owner, "_tunnel_host", None) or getattr(call.owner, "host", "")
    return "" if vouched() else sends(_text(method), _text(host), url)


def _httpcore(call: Call) -> str:
    request = call.argument("request")
    return "" if vouched() else sends(_text(request.method), _text(request.url.host), _text(request.url.target))


def _method_and_url(call: Call) -> str:
    return judge_url(call.argument("method", default="GET"), call.argument("url", default=""))


def _tornado(call: Call) -> str:
    return judge_url(call.argument("method", default="GET"), call.argument("url", default=""))


def _pycurl(call: Call) -> str:
    """libcurl is told bit by bit; the bit that makes it a write is enough, whatever the host."""
    constants = sys.modules["pycurl"]
    option, value = (*call.args, None, None)[:2]
    writes = [getattr(constants, name, None) for name in ("UPLOAD", "POST", "POSTFIELDS", "HTTPPOST", "MIMEPOST")]
    if option == getattr(constants, "CUSTOMREQUEST", None):
        return "" if str(value).upper() in READING_METHODS else f"sends {value}"
    return "sends data" if option in writes and value else ""


def _grpc(call: Call) -> str:
    method = _text(getattr(call.owner, "_method", ""))
    target = _text(getattr(call.owner, "_channel", None) and call.owner._channel.target())
    host = target.rpartition("/")[2].rpartition(":")[0] if not target.startswith("unix:") else ""
    read = re.match(r"(Get|List|Describe|Search|Query|Lookup|BatchGet|Read|Check|Watch)", method.rpartition("/")[2])
    return "" if read or is_here(host) else f"calls {method.rpartition('/')[2]} on {host}"


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
    Client("tornado", "tornado.httpclient", "HTTPRequest.__init__", judge=_tornado),
    Client("curl_cffi", "curl_cffi.requests.session", "Session.request AsyncSession.request", judge=_method_and_url),
    Client("pycurl", "pycurl", "Curl.setopt", judge=_pycurl),
    Client(
        "grpc",
        "grpc._channel",
        "_UnaryUnaryMultiCallable.__call__ _UnaryUnaryMultiCallable.with_call _UnaryUnaryMultiCallable.future "
        "_UnaryStreamMultiCallable.__call__ _SingleThreadedUnaryStreamMultiCallable.__call__ "
        "_StreamUnaryMultiCallable.__call__ _StreamUnaryMultiCallable.with_call _StreamUnaryMultiCallable.future "
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
"""Below every client by name: what sends HTTP."""
