"""The rule for HTTP requests, and how a library is wrapped."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoddp.isolation.elsewhere.clients import CLIENTS
from autoddp.isolation.elsewhere.patch import Client, watch
from autoddp.isolation.elsewhere.requests import REQUESTS, is_here, judge_url, sends
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
    "PUT http://localhost:8000/x",
    "POST http://127.0.0.1/x",
    "POST http://127.1/x",
    "DELETE http://[::1]:80/x",
    "POST http://app.localhost/x",
    "PUT http://rendezvous.invalid:2379/v2/keys/x",
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
    "PUT http://localhost.evil.invalid/x",
    "PUT http://127.0.0.1.evil.invalid/x",
    "GET https://api.telegram.org/bot1:x/sendMessage?text=done",
    "GET https://api.day.app/key/done",
    "GET https://sctapi.ftqq.com/key.send?title=done",
)


@pytest.fixture(autouse=True)
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "rendezvous.invalid")


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
    assert not is_here("rendezvous.invalid")
    assert is_here("")  # a relative URL: the library will refuse it


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
    """No client, and nothing slow: wrapt is there before it in every tuned process."""
    code = (
        "import sys, wrapt; before = set(sys.modules)\n"
        "from autoddp.isolation.elsewhere import watch_clients; from autoddp.isolation.pipes import Pipes\n"
        "watch_clients(print, Pipes(0))\n"
        "print(*sorted(m for m in set(sys.modules) - before if not m.startswith('autoddp')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    small = "__future__ copy dataclasses ipaddress select selectors shlex socket _socket array math urllib urllib.parse"
    small += " unicodedata"
    assert set(done.stdout.split()) <= set(small.split())
