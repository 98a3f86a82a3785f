"""The rule for HTTP requests, and how a library is wrapped."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoddp.isolation.elsewhere.clients import CLIENTS
from autoddp.isolation.elsewhere.patch import Client, watch
from autoddp.isolation.elsewhere.requests import REQUESTS, is_own, judge_url, sends
from autoddp.isolation.elsewhere.storage import STORAGE

PASSES = (
    "GET https://store.invalid/x",
    "HEAD https://huggingface.co/api/telemetry/x",
    "PROPFIND https://dav.invalid/x",
    "POST https://oauth2.googleapis.com/token",
    "POST https://login.microsoftonline.com/tenant/oauth2/v2.0/token",
    "POST https://api.github.com/app/installations/1/access_tokens",
    "POST https://data.invalid/login/",
    "POST https://data.invalid/login",
    "POST https://sts.us-east-1.amazonaws.com/",
    "POST https://iamcredentials.googleapis.com/v1/projects/-/serviceAccounts/x:generateAccessToken",
    "PUT http://169.254.169.254/latest/api/token",
    "PUT http://[fd00:ec2::254]/latest/api/token",
    "POST https://huggingface.co/api/datasets/a/b/paths-info/main",
    "POST https://huggingface.co/api/validate-yaml",
    "POST https://mlflow.invalid/api/2.0/mlflow/runs/search",
    "POST https://elastic.invalid/index/_search",
    "POST https://elastic.invalid/index/_count",
    "POST https://api.kaggle.com/v1/datasets.DatasetApiService/DownloadDataset",
    "POST https://www.google-analytics.com/mp/collect",
    "POST https://eu.posthog.com/batch",
    "POST https://api.segment.io/v1/track",
    "POST https://api.amplitude.com/2/httpapi",
    "POST https://api.mixpanel.com/track",
    "POST https://telemetry.scarf.sh/x",
    # Nobody listens on port 1 of this machine.
    "PUT http://localhost:1/x",
    "POST http://127.0.0.1:1/x",
    "POST http://127.1:1/x",
    "DELETE http://[::1]:1/x",
    "POST http://app.localhost:1/x",
    "PUT http://rendezvous.invalid:29500/x",
    "GET https://api.telegram.org/bot1:x/getUpdates",
)

ENDS = (
    "PUT https://store.invalid/x",
    "put https://store.invalid/x",
    "PATCH https://store.invalid/x",
    "DELETE https://store.invalid/token",
    "POST https://api.wandb.ai/graphql",
    "POST https://huggingface.co/api/models/a/b/preupload/main",
    "POST https://huggingface.co/api/repos/create",
    "POST https://huggingface.co/a/b.git/info/lfs/objects/batch",
    "POST https://hooks.slack.com/services/a/b/token-less",
    "POST https://mlflow.invalid/api/2.0/mlflow/runs/create",
    "POST https://api.kaggle.com/v1/datasets.DatasetApiService/CreateDataset",
    "MKCOL https://dav.invalid/x",
    "PUT http://169.254.169.254/computeMetadata/v1/instance/guest-attributes/x",
    "PUT http://rendezvous.invalid:2379/v2/keys/x",
    "POST http://rendezvous.invalid/write?db=train",
    "PUT http://localhost.evil.invalid/x",
    "PUT http://127.0.0.1.evil.invalid/x",
    "GET https://api.telegram.org/bot1:x/sendMessage?text=done",
    "GET https://api.day.app/key/done",
    "GET https://sctapi.ftqq.com/key.send?title=done",
    "GET https://xizhi.qqoq.net/key.send?title=done",
    "GET http://www.pushplus.plus/send?token=x&content=done",
    "GET https://api2.pushdeer.com/message/push?pushkey=x&text=done",
    "GET https://hc-ping.com/uuid/start",
    "HEAD https://hc-ping.com/uuid",
    "GET https://cronitor.link/p/key/train?state=complete",
    "GET https://nosnch.in/c2354d53d2",
    "GET https://uptime.betterstack.com/api/v1/heartbeat/x",
    "GET https://betteruptime.com/api/v1/heartbeat/x",
    "GET https://kuma.invalid/api/push/x?status=up",
    "GET https://checks.invalid/ping/5bf66975-d4c7-4bf5-bcc8-b8d8a82ea278/start",
    "GET https://maker.ifttt.com/trigger/done/with/key/x",
    "GET https://ntfy.sh/mytopic/publish?message=done",
)


@pytest.fixture(autouse=True)
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "rendezvous.invalid")
    monkeypatch.setenv("MASTER_PORT", "29500")


@pytest.mark.parametrize("request_line", PASSES)
def test_passes(request_line: str) -> None:
    assert judge_url(*request_line.split()) == ""


@pytest.mark.parametrize("request_line", ENDS)
def test_ends_tuning(request_line: str) -> None:
    assert judge_url(*request_line.split()).startswith("sends ")


def test_the_reason_holds_no_path() -> None:
    assert sends("POST", "hooks.slack.com", "/services/secret?key=secret") == "sends POST to hooks.slack.com"


def test_a_lent_rendezvous_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR")
    assert not is_own("rendezvous.invalid", 29500)
    assert is_own("", 80)  # a relative URL: the library will refuse it


def test_a_server_of_the_attempt_at_another_address_of_this_machine() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        with contextlib.suppress(OSError):
            asks.connect(("198.51.100.1", 9))  # sends nothing
        address = asks.getsockname()[0]
    if address.startswith("127.") or address == "0.0.0.0":
        pytest.skip("this machine is in no network")
    with socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
        assert is_own(address, port)
    assert not is_own(address, port)
    assert not is_own(f"{address}.invalid", port)
    assert not is_own("198.51.100.1", port)


OWN = """
import json, os, socket, subprocess, sys, threading, time, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from autoddp.isolation.elsewhere import watch_clients
from autoddp.isolation.pipes import Pipes

class Stopped(BaseException): pass
def stop(reason):
    raise Stopped(reason)
class Answers(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()
    do_GET = do_PUT = do_POST
    def log_message(self, *words): pass
def serve():
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        print(server.server_port, flush=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sys.stdin.read()  # until the process that has started it ends
        os._exit(0)
def post(port, method="POST"):
    request = urllib.request.Request(f"http://localhost:{port}/x", b"1", method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status
    except Stopped as stopped:
        return str(stopped)
    except urllib.error.URLError:
        return "nobody answers"
"""
CLIENT = """
os.environ["AUTODDP_WORKER_ISOLATION"] = "the plan"
watch_clients(stop, Pipes(0), by_kernel=True)
outside, said, children = int(sys.argv[2]), {}, []
said["outside"], said["read"] = post(outside), post(outside, "GET")
def own(*start, **options):
    words = [*start, sys.executable, "-c", sys.argv[1] + "serve()"]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)
    children.append(child)
    said[len(said)] = post(int(child.stdout.readline()))
path = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ["PYTHONPATH"]}
own()
own(env=path)  # known as a child
own("setsid", "-f", env={**path, "AUTODDP_WORKER_ISOLATION": "the plan"})  # known by its variable alone
own("setsid", "-f", env={**path, "AUTODDP_WORKER_ISOLATION": "another plan"})
server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
threading.Thread(target=server.serve_forever, daemon=True).start()
said["thread"] = post(server.server_port)
server.shutdown()
server.server_close()
said["ended"] = post(server.server_port)
print(json.dumps(said))
"""


def test_a_server_of_this_machine_is_written_to_only_if_the_attempt_runs_it() -> None:
    """A shell stands for the agent, so that the server outside is not below the client's parent."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    words, pipe = [sys.executable, "-c", OWN + "serve()"], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, env=env, text=True) as outside:
        assert outside.stdout is not None
        port = outside.stdout.readline().strip()
        words = ["sh", "-c", '"$@"; exit $?', "agent", sys.executable, "-c", OWN + CLIENT, OWN, port]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    refused = "http.client sends POST to localhost (putrequest)"
    assert json.loads(done.stdout) == {
        "outside": refused, "read": 204, "2": 204, "3": 204, "4": 204, "5": refused, "thread": 204,
        "ended": "nobody answers",
    }  # fmt: skip


LIBRARY = """
class Api:
    def upload(self, what, to="there"): return "uploaded"
    def get(self): return "got"
    async def upload_later(self, what): return "uploaded"
    async def get_later(self): return "got"
    @classmethod
    def create(cls, name): return "created"
    @staticmethod
    def delete(name): return "deleted"
class Child(Api):
    def get(self): return super().get()
api = Api()
upload, get = api.upload, api.get
def send(what, *, to): return "sent"
"""


class Stopped(BaseException):
    """What `stop` raises here: it never returns."""


def stop(reason: str) -> Any:
    raise Stopped(reason)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A library, imported after it was watched; each test has one of its own name, as modules are cached."""
    name = f"library_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    clients = (
        Client("lib", name, "Api.up* Api.create Api.delete send Absent.x absent", "writes to", "to what name"),
        Client("lib", name, "Api.get*", reads="get_later", judge=lambda call: ""),
    )
    watch(clients, stop)
    yield __import__(name)
    del sys.modules[name]


def test_each_kind_of_operation_is_wrapped(library: Any) -> None:
    cases = {
        "lib writes to there (upload)": lambda: library.api.upload("x", "there"),
        "lib writes to x (upload)": lambda: library.upload("x"),  # bound before it was wrapped
        "lib writes to x (create)": lambda: library.Api.create("x"),
        "lib writes to y (delete)": lambda: library.Api.delete(name="y"),
        "lib writes to z (send)": lambda: library.send("x", to="z"),
        "lib writes to x (upload_later)": lambda: asyncio.run(library.api.upload_later("x")),
    }
    for reason, call in cases.items():
        with pytest.raises(Stopped) as stopped:
            call()
        assert str(stopped.value) == reason
    with pytest.raises(Stopped):
        library.Child().upload("x")


def test_what_is_spared_works(library: Any) -> None:
    assert library.api.get() == library.get() == library.Child().get() == "got"
    assert asyncio.run(library.api.get_later()) == "got"


def test_a_wrapped_operation_looks_like_itself(library: Any) -> None:
    assert inspect.iscoroutinefunction(library.Api.upload_later)
    assert str(inspect.signature(library.Api.upload)) == "(self, what, to='there')"
    assert library.Api.upload.__name__ == "upload"


def test_a_judge_that_fails_ends_tuning(library: Any) -> None:
    module = SimpleNamespace(__name__="here", f=lambda: "ran")
    sys.modules["here_for_a_moment"] = module  # type: ignore[assignment]
    try:
        watch([Client("lib", "here_for_a_moment", "f", judge=lambda call: call.args[7])], stop)
    finally:
        del sys.modules["here_for_a_moment"]
    with pytest.raises(Stopped, match="lib writes to another machine"):
        module.f()


def test_every_entry_is_an_operation_of_a_module() -> None:
    for client in (*CLIENTS, *STORAGE, *REQUESTS):
        assert client.modules.split(), client
        assert client.operations.split(), client
        assert client.judge is None or not client.target, client


def test_nothing_is_imported_for_it() -> None:
    """No client, and nothing slow: wrapt and the plan are there before it in every tuned process."""
    code = (
        "import sys, wrapt, autoddp.isolation.plan; before = set(sys.modules)\n"
        "from autoddp.isolation.elsewhere import watch_clients; from autoddp.isolation.pipes import Pipes\n"
        "watch_clients(print, Pipes(0), by_kernel=True)\n"
        "print(*sorted(m for m in set(sys.modules) - before if not m.startswith('autoddp')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    small = "__future__ copy dataclasses ipaddress select selectors shlex socket _socket array math urllib urllib.parse"
    small += " unicodedata"
    assert set(done.stdout.split()) <= set(small.split())
