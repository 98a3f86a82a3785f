"""What the rendezvous' options mean, against what torchrun's own code makes of them, in all combinations.

Nothing is connected: torch's stores are replaced by one that notes where it would be, because half of these places do
not exist.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import logging
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, c10d_rendezvous_backend
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.run import config_from_args

from autoddp.errors import UsageError
from autoddp.torchrun import options

PARSER = options.torchrun_parser()
NODES = ("1", "2", "1:3")
ENDPOINTS = (
    *("", " ", "localhost", "localhost:0", "127.0.0.1:29555", " 127.0.0.1:29555 ", "10.9.8.7", "10.9.8.7:1", "host0:x"),
    *(":8080", "host0:", "host0:99999", "fe80::1 127.0.0.1:29555", "fd00::1:29555", "[fd00::1]:29555", "[fd00::1]"),
    *("tcp://127.0.0.1:29555", "a,b:1", "127.0.0.1:65535", "127.0.0.1:65536"),
)
CONFS = (
    *("", "is_host=1", "is_host=0", "is_host=maybe", "read_timeout=5", "read_timeout=0", "read_timeout=x", "timeout=7"),
    *("timeout=x", "join_timeout=5,last_call_timeout=1", "join_timeout=-1", "store_type=tcp", "store_type=FILE"),
    *("store_type=redis", "is_host", "=1", "backend=c10d", "local_addr=10.0.0.1", "keep_alive_interval=x"),
)
MASTERS = ((None, None), ("10.9.8.7", None), ("localhost", 29600), ("10.9.8.7", 0))


def arguments(nodes: str, backend: str, endpoint: str, conf: str, master: tuple[Any, Any]) -> argparse.Namespace:
    words = ["--nnodes", nodes, "--rdzv-backend", backend, "--rdzv-endpoint", endpoint, "--rdzv-conf", conf]
    words += [] if master[0] is None else ["--master-addr", master[0]]
    words += [] if master[1] is None else ["--master-port", str(master[1])]
    return PARSER.parse_args([*words, "train.py"])


CASES = {
    "static": list(itertools.product(NODES, ENDPOINTS, CONFS, MASTERS)),
    "c10d": list(itertools.product(NODES, ENDPOINTS, CONFS, MASTERS[::2])),  # which it does not read
    "bogus": list(itertools.product(NODES, ENDPOINTS[:3], CONFS[:3], MASTERS[:1])),
    "": list(itertools.product(NODES, ENDPOINTS[:3], CONFS[:3], MASTERS[:1])),
}


class Place(HashStore):
    """Where torch would connect, and whether it would be the server there."""

    def __init__(self, host: str, port: int, *, is_master: bool, **more: Any) -> None:
        super().__init__()
        _places.append((host, port, is_master))


_places: list[tuple[str, int, bool]] = []


@pytest.fixture(autouse=True)
def nothing_is_connected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(c10d_rendezvous_backend, "TCPStore", Place)
    monkeypatch.setattr(c10d_rendezvous_backend, "FileStore", lambda path: HashStore())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where torch makes a file of its own for it
    monkeypatch.chdir(tmp_path)  # an endpoint of the store "file" is a path
    monkeypatch.setattr(options, "_is_taken", lambda port: False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Whether an address is this host's is asked again and again, and a name service may take seconds each time.
    monkeypatch.setattr(socket, "getaddrinfo", functools.cache(socket.getaddrinfo))
    monkeypatch.setattr(socket, "getfqdn", functools.cache(socket.getfqdn))
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def by_torchrun(given: argparse.Namespace) -> tuple[str, int, bool] | str | None:
    """Where torchrun would meet and whether it keeps the store there, why it would not; None for no address."""
    _places.clear()
    most = options.node_range(given)[1]
    if given.rdzv_backend == "static" and not given.rdzv_endpoint and given.master_port is None and most == 1:
        # as `torch.distributed.run.run` does
        given = argparse.Namespace(**{**vars(given), "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"})
    given = argparse.Namespace(
        **{**vars(given), "master_port": 29500 if given.master_port is None else given.master_port}
    )
    try:
        config, _, _ = config_from_args(given)
        parameters = RendezvousParameters(
            config.rdzv_backend,
            config.rdzv_endpoint,
            "job",
            config.min_nodes,
            config.max_nodes,
            local_addr=config.local_addr,
            **config.rdzv_configs,
        )
        handler: Any = get_rendezvous_handler(parameters)
    except (ValueError, TypeError) as error:
        return str(error)
    if given.rdzv_backend == "static":
        return handler.master_addr, handler.master_port, given.node_rank == 0
    return _places[0] if _places else None


@pytest.mark.parametrize("backend", CASES)
def test_what_torchrun_refuses_is_refused_and_nothing_else(backend: str) -> None:
    """But for port 0, where other hosts have to come, and cannot know which one it is."""
    refused = allowed = 0
    for nodes, endpoint, conf, master in CASES[backend]:
        given = arguments(nodes, backend, endpoint, conf, master)
        theirs = by_torchrun(given)
        try:
            options.require_rendezvous(given)
            ours = ""
        except UsageError as error:
            ours = str(error)
        is_port_0 = isinstance(theirs, tuple) and theirs[1] == 0 and options.node_range(given)[0] > 1
        assert bool(ours) is (isinstance(theirs, str) or is_port_0), (vars(given), theirs, ours)
        assert "\n" not in ours
        refused, allowed = refused + bool(ours), allowed + (not ours)
    assert refused > 20
    assert (allowed > 100) is (backend in ("static", "c10d"))


@pytest.mark.parametrize("words", [["--master-port", "29700"], ["--rdzv-endpoint", "localhost:29700"]])
def test_a_port_that_is_taken_is_an_error_before_tuning(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs on one host mostly: torchrun ends at once, and autoddp tuned for minutes before it did."""
    given = PARSER.parse_args([*words, "train.py"])
    options.require_rendezvous(given)
    monkeypatch.setattr(options, "_is_taken", lambda port: port == 29700)
    with pytest.raises(UsageError, match="another program on this host has the port"):
        options.require_rendezvous(given)
    options.require_rendezvous(PARSER.parse_args(["train.py"]))  # torchrun takes any free port
    options.require_rendezvous(given, starts_job=False)  # as under --tune-only: each attempt takes any free port


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_an_empty_run_id_is_an_error_on_several_hosts_alone(backend: str) -> None:
    """As of `--rdzv-id=$SLURM_JOB_ID` outside of Slurm: torchrun makes one, and starts a job on one host."""
    words = ["--rdzv-id=", "--rdzv-backend", backend, "--rdzv-endpoint", "localhost:29555", "train.py"]
    options.require_rendezvous(PARSER.parse_args(words))
    for nodes in ("2", "1:2"):
        with pytest.raises(UsageError, match="--rdzv-id is empty, and each host would make one of its own"):
            options.require_rendezvous(PARSER.parse_args(["--nnodes", nodes, *words]))


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_the_place_where_hosts_meet_is_torchruns(backend: str) -> None:
    seen = set()
    for nodes, endpoint, conf, master in (case for case in CASES[backend] if case[0] != "1"):
        given = arguments(nodes, backend, endpoint, conf, master)
        theirs = by_torchrun(given)
        if isinstance(theirs, str) or (theirs is not None and theirs[1] == 0):
            continue
        found = options.endpoint(given)
        told = "is_host" in conf and backend == "static"  # a static rendezvous does not read it
        ours = None if found is None else (found[0].host, found[0].port, theirs[2] if told and theirs else found[1])
        assert ours == theirs, vars(given)
        seen.add(ours)
    assert len(seen) > 5


@pytest.mark.parametrize("host", [".cluster.local", "a..b", f"{'x' * 64}.b"])
def test_what_can_be_no_name_is_no_name_of_this_host(host: str) -> None:
    """As where `$NODE.cluster.local` is given and NODE is not set; the meeting says that it does not resolve."""
    given = arguments("2", "c10d", f"{host}:29400", "", (None, None))
    options.host_endpoint_if_ours(given, {"10.0.0.1"})
    found = options.endpoint(given)
    assert found is not None
    assert (found[0].host, found[1]) == (host, False)


@pytest.mark.parametrize(("backend", "found"), [("static", (3, 3)), ("c10d", (1, 3))])
def test_a_static_rendezvous_has_no_range(backend: str, found: tuple[int, int]) -> None:
    """torch waits there for the last host: one tuned alone after half a minute, or was started without a lost one."""
    given = arguments("1:3", backend, "", "", MASTERS[1])
    assert options.node_range(given) == found
    if backend == "static":
        config, _, _ = config_from_args(argparse.Namespace(**{**vars(given), "master_port": 29500}))
        parameters = RendezvousParameters("static", config.rdzv_endpoint, "job", 1, config.max_nodes, rank=0)
        assert get_rendezvous_handler(parameters).world_size == found[0]  # type: ignore[attr-defined]


def test_a_torch_without_newer_options_is_no_error() -> None:
    """--event-log-handler came with torch 2.8, --signals-to-handle and --shutdown-timeout later still."""
    newer = ("event_log_handler", "signals_to_handle", "shutdown_timeout", "numa_binding")
    known = vars(arguments("1", "static", "", "", MASTERS[0])).items()
    older = argparse.Namespace(**{name: value for name, value in known if name not in newer})
    options.require_job_options(older)
    assert options.ending_signals(older)
