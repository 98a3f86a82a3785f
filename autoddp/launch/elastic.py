"""The single point of contact with torch elastic: its parser, the real job, and the tuning job beside it."""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import logging
import os
import signal
import socket
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from autoddp.errors import UsageError
from autoddp.launch.gathering import Arrivals, Endpoint
from autoddp.log import tell

_FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""The workers make a store of their own, and do not use their agent's."""
AGENTS_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}
"""Our own workers meet in the store before they make a process group, so it must not be one that rank 0 makes there."""
_BOARD = timedelta(seconds=60)
_TIMEOUT = 900  # seconds; torchrun's own for a static rendezvous, where --rdzv-conf names none
_READ_TIMEOUT = 60  # seconds; torch's own for c10d, likewise
DEFAULT_PORT = 29500  # torchrun's, for a static rendezvous without --master-port


def load_torchrun() -> None:
    """Import all that torchrun itself imports."""
    import torch.distributed.run  # noqa: F401


def torchrun_parser() -> argparse.ArgumentParser:
    """The installed torch's own parser, fresh."""
    from torch.distributed.run import get_args_parser

    parser: argparse.ArgumentParser = get_args_parser()
    parser.prog = "autoddp"
    return parser


def run_real_job(torchrun: argparse.Namespace) -> None:
    """What torchrun does with these arguments, by torchrun's own code."""
    from torch.distributed.run import run

    run(torchrun)


def processes_per_node(torchrun: argparse.Namespace) -> int:
    """How many ranks this node starts; ValueError, torch's own, for a word that it does not know."""
    from torch.distributed.run import determine_local_world_size

    with _quiet_elastic(None):
        return int(determine_local_world_size(torchrun.nproc_per_node))


def node_range(torchrun: argparse.Namespace) -> tuple[int, int]:
    """Fewest and most nodes."""
    from torch.distributed.run import parse_min_max_nnodes

    fewest, most = parse_min_max_nnodes(torchrun.nnodes)
    return int(fewest), int(most)


def host_endpoint_if_ours(torchrun: argparse.Namespace, addresses: set[str]) -> None:
    """Say that this node hosts the c10d store if the endpoint is one of its `addresses` and elastic cannot know that.

    Elastic compares the endpoint with what the host's name resolves to, and finds nobody to host the store where the
    name stands for 127.0.1.1. Where it can know, nothing is said: of two agents on one machine one then gives way.
    """
    from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

    if torchrun.rdzv_backend != "c10d" or "is_host" in torchrun.rdzv_conf or not torchrun.rdzv_endpoint:
        return
    with _rendezvous_errors(torchrun):
        host, _ = parse_rendezvous_endpoint(torchrun.rdzv_endpoint, DEFAULT_PORT)
    try:
        ours = bool({found[4][0] for found in socket.getaddrinfo(host, None)} & addresses)
    except OSError:
        ours = False  # the meeting will say so
    try:
        told = "is_host=1" if not _matches_machine_hostname(host) and ours else ""
    except OSError:  # this host's own name has no address at all, and elastic would end with a traceback
        told = f"is_host={int(ours)}"
    torchrun.rdzv_conf = ",".join(filter(None, [torchrun.rdzv_conf, told]))


def endpoint(torchrun: argparse.Namespace) -> Endpoint | None:
    """Where the hosts meet; None where that is no address and port. UsageError for one that cannot be read."""
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config, parse_rendezvous_endpoint

    arguments = _other_rendezvous(torchrun, "")
    if arguments.rdzv_backend != "c10d" or not arguments.rdzv_endpoint:
        return None
    with _rendezvous_errors(torchrun):
        if _parse_rendezvous_config(arguments.rdzv_conf).get("store_type", "tcp").strip().lower() != "tcp":
            return None
        host, port = parse_rendezvous_endpoint(arguments.rdzv_endpoint, DEFAULT_PORT)
    return Endpoint("--rdzv-endpoint" if torchrun.rdzv_endpoint else "--master-addr", host, port)


def hosts_endpoint(torchrun: argparse.Namespace) -> bool:
    """Whether this node is to keep the endpoint's store."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, _parse_rendezvous_config

    place = endpoint(torchrun)
    assert place is not None
    config = _parse_rendezvous_config(_other_rendezvous(torchrun, "").rdzv_conf)
    told = RendezvousParameters("c10d", str(place), "", 1, 1, **config).get_as_bool("is_host")
    return bool(_matches_machine_hostname(place.host) if told is None else told)


def endpoint_patience(torchrun: argparse.Namespace) -> float:
    """Seconds that torchrun would wait until somebody listens at the endpoint."""
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

    config = _parse_rendezvous_config(torchrun.rdzv_conf)
    static = torchrun.rdzv_backend == "static"
    name, usual = ("timeout", _TIMEOUT) if static else ("read_timeout", _READ_TIMEOUT)
    return float(config.get(name, usual))


def board(place: Endpoint) -> Any:
    """A store at the endpoint, for words about who has come; its keys are apart from elastic's."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    try:
        store = TCPStore(place.host, place.port, is_master=False, timeout=_BOARD)
    except RuntimeError as error:
        first = next(iter(str(error).splitlines()), "there is no store")
        raise UsageError(f"the hosts cannot meet at {place}: {first}") from None
    return PrefixStore("autoddp", store)


def run_tuning_job(torchrun: argparse.Namespace, folder: Path, number: int) -> str:
    """One attempt: the script's workers with this process's environment. Blocks; "" or why it failed.

    Elastic restarts nothing: another attempt is to find the user's files as they are. Whatever elastic says meanwhile
    goes to the attempt's folder, as do the workers' stdout and stderr, one file per rank.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args

    arguments = _tuning_arguments(torchrun, folder, f"tune{number}")
    fresh = _FRESH_STORE if node_range(torchrun)[1] > 1 and _agents_share_one_store() else {}
    with _quiet_elastic(folder / "elastic.log"), environment_with(fresh):
        config, command, words = config_from_args(arguments)
        try:
            elastic_launch(config=config, entrypoint=command)(*words)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            return f"rank {rank} ended with exit code {failure.exitcode}"
    return ""


def _agents_share_one_store() -> bool:
    """Whether the workers on several hosts are given the store through which the agents meet, as in older torch.

    There a rank may find the address under which its peer has listened in the attempt before. In newer versions the
    agent of each start makes a store for its workers, and tells the others its port; scripts may use that store before
    they make a process group.
    """
    from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

    return "server_port" not in inspect.signature(RendezvousStoreInfo.build).parameters


def run_own_job(torchrun: argparse.Namespace, name: str, more: dict[str, str]) -> str:
    """A job of ours on the user's hosts, without restarts, `more` in its environment. Blocks; "" or why it failed.

    The workers' output goes where the user's options send it. UsageError for hosts that cannot meet; a signal ends this
    process as it would have ended the job.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args

    arguments = _other_rendezvous(torchrun, name)
    arguments.max_restarts = 0
    with _quiet_elastic(None), _signal_handlers_kept(), environment_with(AGENTS_STORE | more):
        try:
            with _rendezvous_errors(arguments):
                config, command, words = config_from_args(arguments)
                elastic_launch(config=config, entrypoint=command)(*words)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            return f"rank {rank} ended with exit code {failure.exitcode}"
        except SignalException as error:
            raise SystemExit(128 + error.sigval) from None  # as shells have it
    return ""


def meeting_point(torchrun: argparse.Namespace, name: str) -> Any:
    """A rendezvous handler at the job's own endpoint, for launchers to meet before the job.

    Whoever holds it keeps the endpoint's store alive, so that one job's end and the next one's start cannot race.
    """
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

    arguments = _other_rendezvous(torchrun, name)
    fewest, most = node_range(torchrun)
    config = {"timeout": _TIMEOUT, **_parse_rendezvous_config(arguments.rdzv_conf)}
    parameters = RendezvousParameters(
        backend=arguments.rdzv_backend,
        endpoint=arguments.rdzv_endpoint,
        run_id=arguments.rdzv_id,
        min_nodes=fewest,
        max_nodes=most,
        local_addr=_identity(torchrun),
        **config,
    )
    with _rendezvous_errors(arguments):
        return get_rendezvous_handler(parameters)


def _identity(torchrun: argparse.Namespace) -> str:
    """What tells this launcher from all others at a meeting; they are numbered by the order of these.

    Elastic would take the host's name and the process id, which two hosts called localhost may share.
    """
    rank = f"{torchrun.node_rank:06}." if torchrun.rdzv_backend == "static" else ""
    return f"{rank}{socket.gethostname()}.{uuid.uuid4().hex}"


def connection_is_lost(error: Exception) -> bool:
    """Whether this error of a store says that its connection has broken, so that it can never be asked again."""
    from torch.distributed import DistNetworkError

    return isinstance(error, DistNetworkError | ConnectionError)


def meet(handler: Any, torchrun: argparse.Namespace, arrivals: Arrivals | None) -> Any:
    """Wait for all launchers at a meeting point; torch's RendezvousInfo (store, rank, world_size)."""
    told = contextlib.nullcontext() if arrivals is None else arrivals.told(tell)
    # Without a store for workers, which no meeting of launchers needs: the identity is no address to have it at.
    with _rendezvous_errors(torchrun, arrivals), told, environment_with(_FRESH_STORE):
        return handler.next_rendezvous()


@contextlib.contextmanager
def _rendezvous_errors(arguments: argparse.Namespace, arrivals: Arrivals | None = None) -> Iterator[None]:
    """Hosts that cannot meet are the user's to mend: one line, as long as nothing has been started."""
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        yield
    except (ValueError, RendezvousError) as error:
        first = next(iter(str(error).splitlines()), "") or type(error).__name__
        where = f"--rdzv-backend {arguments.rdzv_backend} --rdzv-endpoint {arguments.rdzv_endpoint or 'none'}"
        if arguments.rdzv_backend == "static" and not arguments.rdzv_endpoint:
            where = f"--master-addr {arguments.master_addr} --master-port {arguments.master_port or DEFAULT_PORT}"
        came = f"; {so_far}" if arrivals is not None and (so_far := arrivals.so_far()) else ""
        raise UsageError(f"the hosts cannot meet ({where}): {first}{came}: check both on every host") from None


def _other_rendezvous(torchrun: argparse.Namespace, name: str) -> argparse.Namespace:
    """The same hosts under another run id. A static rendezvous lends its endpoint to a dynamic one.

    Dynamic, because only there a restart on one node restarts the others; and because a static job's workers keep their
    keys in the endpoint's store, where the next job's workers would find them.
    """
    arguments = copy.copy(torchrun)
    if node_range(torchrun)[1] == 1:
        arguments.rdzv_backend, arguments.rdzv_endpoint = "c10d", "localhost:0"
        arguments.rdzv_id = f"{uuid.uuid4()}.{name}"
        return arguments
    if torchrun.rdzv_backend == "static":
        arguments.rdzv_backend = "c10d"
        master = torchrun.master_addr.strip("[]")
        arguments.rdzv_endpoint = torchrun.rdzv_endpoint or str(
            Endpoint("--master-addr", master, torchrun.master_port or DEFAULT_PORT)
        )
        told = [f"is_host={int(torchrun.node_rank == 0)}"]
        if "join_timeout" not in torchrun.rdzv_conf:
            told.append(f"join_timeout={endpoint_patience(torchrun):.0f}")  # as long as torchrun would wait
        arguments.rdzv_conf = ",".join(filter(None, [torchrun.rdzv_conf, *told]))
    arguments.rdzv_id = f"{torchrun.rdzv_id}.{name}"
    return arguments


def _beside_the_meeting_point(torchrun: argparse.Namespace, name: str) -> argparse.Namespace:
    """How processes of their own meet on the same hosts.

    On several nodes this process, or another node's launcher, must keep the endpoint's store open meanwhile.
    """
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

    arguments = _other_rendezvous(torchrun, name)
    config = _parse_rendezvous_config(arguments.rdzv_conf)
    if arguments.rdzv_backend == "c10d" and node_range(torchrun)[1] > 1:
        config["is_host"] = "0"
    arguments.rdzv_conf = ",".join(f"{key}={value}" for key, value in config.items())
    return arguments


def meeting_words(torchrun: argparse.Namespace, name: str) -> list[str]:
    """torchrun's options by which processes of their own meet on the same hosts, without restarts."""
    arguments = _beside_the_meeting_point(torchrun, name)
    words = {
        "--nnodes": torchrun.nnodes,
        "--nproc-per-node": str(torchrun.nproc_per_node),
        "--rdzv-backend": arguments.rdzv_backend,
        "--rdzv-endpoint": arguments.rdzv_endpoint,
        "--rdzv-id": arguments.rdzv_id,
        "--rdzv-conf": arguments.rdzv_conf,
        "--local-addr": torchrun.local_addr,
        "--max-restarts": "0",
    }
    return [word for option, value in words.items() if value for word in (option, value)]


def _tuning_arguments(torchrun: argparse.Namespace, logs: Path, name: str) -> argparse.Namespace:
    arguments = _beside_the_meeting_point(torchrun, name)
    arguments.standalone = False
    arguments.node_rank = 0
    arguments.master_port = torchrun.master_port or DEFAULT_PORT
    arguments.max_restarts = 0
    arguments.log_dir = str(logs)
    arguments.redirects, arguments.tee, arguments.local_ranks_filter = "3", "0", ""
    return arguments


@contextlib.contextmanager
def _quiet_elastic(log: Path | None) -> Iterator[None]:
    """torchrun's own remarks belong to the real job, where torchrun makes them again."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.distributed.run")]
    loggers += [logging.getLogger(n) for n in list(logging.root.manager.loggerDict) if n.startswith(loggers[0].name)]
    before = [(logger, list(logger.handlers), logger.propagate) for logger in loggers]
    handler = logging.FileHandler(log) if log else logging.NullHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        for logger, handlers, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
        handler.close()


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Elastic installs handlers and leaves them; between two jobs they would raise its exception in our code."""
    present = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    try:
        yield
    finally:
        for number, handler in present.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def environment_with(variables: dict[str, str]) -> Iterator[None]:
    """Set variables for the workers of one job; afterwards the environment is what it was, to the last variable."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
