"""All that autoddp asks of torch elastic: its parser, the real job, the tuning job, and meetings of launchers."""

from __future__ import annotations

import argparse
import contextlib
import copy
import errno
import importlib.util
import inspect
import logging
import os
import re
import signal
import socket
import stat
import sys
import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

from autoddp.errors import UsageError, first_line
from autoddp.files import append
from autoddp.log import tell
from autoddp.network.gathering import Arrivals, Endpoint
from autoddp.network.own_network import on_one_host
from autoddp.processes.signals import ENDING

_FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""The workers make a store of their own instead of using their agent's."""
_AGENTS_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}
"""Our own workers meet in the agent's store before they make a process group, so rank 0 must not make another one."""
_ROOT = Path(__file__).resolve().parents[2]
_BOARD = timedelta(seconds=60)  # for an answer of the store
_SILENCE = (
    {
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 30,  # seconds, of a question that has arrived
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 30,
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 3,
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 120_000,  # milliseconds, of one that has not
    }
    if sys.platform == "linux"
    else {}
)
"""Options of sockets, with which a connection ends two minutes after the other host was last heard."""
_TIMEOUT = 900  # seconds; torchrun's own for a static rendezvous, where --rdzv-conf names none
_LAST_CALL = 30  # seconds; torch's own, likewise
_READ_TIMEOUT = 60  # seconds; torch's own for c10d, likewise
_AHEAD = "AUTODDP_CLOCK_AHEAD"
"""Variable that tells our own jobs by how many seconds the clock that they follow is ahead of this host's."""
OLDEST_TORCH = (2, 6)
"""The oldest version with which a job was tuned; `campaigns/versions.py` tries it and newer ones."""
DEFAULT_PORT = 29500  # torchrun's, for a static rendezvous without --master-port
_C10D_PORT = 29400  # torch's own, for a c10d rendezvous whose endpoint names none
_OF_C10D = ("store_type", "is_host", "read_timeout")
"""Settings that a static rendezvous does not read."""
_OF_ETCD = ("etcd", "etcd-v2")
"""torch's backends that need a library, which has the name of the first."""


def for_own_workers(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which our own workers find this package, also in a checkout, and meet in their agent's store."""
    paths = [str(_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    return {**_AGENTS_STORE, "PYTHONPATH": os.pathsep.join(paths)}


def load_torchrun() -> None:
    """Import all that torchrun itself imports. UsageError if this torch is too old."""
    import torch.distributed.run

    found = torch.__version__
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise UsageError(f"this is torch {found}, and autoddp needs torch {oldest} or newer: pip install -U torch")


def torchrun_parser() -> argparse.ArgumentParser:
    """The installed torch's own parser, fresh."""
    from torch.distributed.run import get_args_parser

    parser: argparse.ArgumentParser = get_args_parser()
    parser.prog = "autoddp"
    return parser


def _settings(arguments: argparse.Namespace) -> dict[str, str]:
    """--rdzv-conf as torch reads it."""
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

    return dict(_parse_rendezvous_config(arguments.rdzv_conf))


def run_real_job(torchrun: argparse.Namespace) -> None:
    """Run the job with these arguments by torchrun's own code."""
    from torch.distributed.run import run

    os.environ.pop(_AHEAD, None)  # this process follows that clock already
    run(torchrun)


def follow_clock(ahead: float) -> None:
    """From here on torch's rendezvous, here and in our own jobs, goes by a clock that is `ahead` seconds ahead.

    Torch compares times that the hosts have written, each by its own clock. Where these differ by 15 seconds it takes
    living hosts for lost.
    """
    os.environ[_AHEAD] = str(ahead)
    _follow(ahead)


def _follow(ahead: float) -> None:
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    module: Any = dynamic_rendezvous
    theirs, difference = module.datetime, timedelta(seconds=ahead)

    class Followed(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return theirs.now(tz) + difference

        @classmethod
        def utcnow(cls) -> Any:  # older versions of torch
            return theirs.utcnow() + difference

    module.datetime = Followed


def processes_per_node(torchrun: argparse.Namespace) -> int:
    """How many ranks this node starts; torch's ValueError for an unknown value of --nproc-per-node."""
    from torch.distributed.run import determine_local_world_size

    with _quiet_elastic(None):
        return int(determine_local_world_size(torchrun.nproc_per_node))


def node_range(torchrun: argparse.Namespace) -> tuple[int, int]:
    """Fewest and most nodes."""
    from torch.distributed.run import parse_min_max_nnodes

    fewest, most = parse_min_max_nnodes(torchrun.nnodes)
    return int(fewest), int(most)


def require_rendezvous(torchrun: argparse.Namespace) -> None:
    """UsageError for a rendezvous that can come to nothing, whatever other hosts do. Connects to nothing.

    torch's own code judges the options, with a store in this process in the place of the one at the endpoint.
    """
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.rendezvous import (
        RendezvousParameters,
        dynamic_rendezvous,
        rendezvous_handler_registry,
        static_tcp_rendezvous,
    )
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    backend, (fewest, most) = torchrun.rdzv_backend, node_range(torchrun)
    if torchrun.standalone:
        if fewest > 1:
            raise UsageError(f"--standalone is for a job on one host, and --nnodes {torchrun.nnodes} needs {fewest}")
        return
    where = torchrun.rdzv_endpoint
    if backend == "static" and not where:
        if most == 1 and torchrun.master_port is None:
            return  # torchrun takes another one
        where = f"{torchrun.master_addr}:{torchrun.master_port or DEFAULT_PORT}"
    try:
        settings: dict[str, Any] = _settings(torchrun) | ({"rank": torchrun.node_rank} if backend == "static" else {})
        # With an address torch does not ask the name service for this host's name, which may take seconds.
        place = (backend, where, torchrun.rdzv_id, fewest, most, torchrun.local_addr or "localhost")
        parameters = RendezvousParameters(*place, **settings)
        if backend == "static":
            static_tcp_rendezvous.create_rdzv_handler(parameters)
        elif backend == "c10d":
            _require_store(parameters)
            dynamic_rendezvous.create_handler(HashStore(), C10dRendezvousBackend(HashStore(), "autoddp"), parameters)
        elif backend not in rendezvous_handler_registry._registry:
            known = ", ".join(rendezvous_handler_registry._registry)
            raise ValueError(f"there is no rendezvous backend of that name, but {known}")
        elif backend in _OF_ETCD and importlib.util.find_spec(_OF_ETCD[0]) is None:
            raise ValueError("its module etcd is not installed here: pip install python-etcd, or --rdzv-backend c10d")
        is_tcp = backend == "static" or (backend == "c10d" and _has_tcp_store(settings))
        if is_tcp and fewest > 1 and parse_rendezvous_endpoint(where, _C10D_PORT)[1] == 0:
            raise ValueError("port 0 is any free port, which the other hosts do not know")
    except (ValueError, TypeError, ImportError) as error:  # TypeError: --rdzv-conf sets what another option sets
        raise UsageError(f"no job can start with {_rendezvous_words(torchrun)}: {first_line(error)}") from None


def _require_store(parameters: Any) -> None:
    """ValueError for parameters with which torch makes no c10d store: the checks before it connects."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    kind = parameters.get("store_type", "tcp").strip().lower()
    if kind not in ("tcp", "file"):
        raise ValueError("Invalid store type given. Currently only supports file and tcp.")
    if kind == "tcp":
        parse_rendezvous_endpoint(parameters.endpoint, _C10D_PORT)
        parameters.get_as_bool("is_host")
        if parameters.get_as_int("read_timeout", _READ_TIMEOUT) <= 0:
            raise ValueError("The read timeout must be a positive integer.")


def _has_tcp_store(settings: Mapping[str, Any]) -> bool:
    return bool(settings.get("store_type", "tcp").strip().lower() == "tcp")


def host_endpoint_if_ours(torchrun: argparse.Namespace, addresses: set[str]) -> None:
    """Tell elastic that this node hosts the c10d store if the endpoint is one of its `addresses`.

    Elastic compares the endpoint with the addresses of the host's name: where that is 127.0.1.1, no node would host the
    store. Where elastic finds out by itself it is told nothing, so that one of two agents on one machine gives way.
    """
    from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

    if torchrun.rdzv_backend != "c10d" or "is_host" in torchrun.rdzv_conf or not torchrun.rdzv_endpoint:
        return
    with _rendezvous_errors(torchrun):
        host, _ = parse_rendezvous_endpoint(torchrun.rdzv_endpoint, _C10D_PORT)
    try:
        ours = bool({found[4][0] for found in socket.getaddrinfo(host, None)} & addresses)
    except OSError:
        ours = False  # the meeting will report it
    try:
        told = "is_host=1" if not _matches_machine_hostname(host) and ours else ""
    except OSError:  # this host's name has no address, which would make elastic end with a traceback
        told = f"is_host={int(ours)}"
    torchrun.rdzv_conf = ",".join(filter(None, [torchrun.rdzv_conf, told]))


def endpoint(torchrun: argparse.Namespace) -> tuple[Endpoint, bool] | None:
    """The endpoint at which the hosts meet, and whether this node is to keep the store there.

    None where that is no address and port. UsageError for one that cannot be read.
    """
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

    arguments = _other_rendezvous(torchrun, "")
    if arguments.rdzv_backend != "c10d":
        return None
    with _rendezvous_errors(torchrun):
        settings: dict[str, Any] = _settings(arguments)
        if not _has_tcp_store(settings):
            return None
        host, port = parse_rendezvous_endpoint(arguments.rdzv_endpoint, _C10D_PORT)
    if port == 0:  # any free port, by which nobody else can come
        return None
    by_address = torchrun.rdzv_backend == "static" and not torchrun.rdzv_endpoint
    place = Endpoint(_master_option(torchrun) if by_address else "--rdzv-endpoint", host, port)
    told = RendezvousParameters("c10d", str(place), "", 1, 1, **settings).get_as_bool("is_host")
    # Where torch is not told, it becomes a client if the port is taken: by another launcher, or by another program.
    return place, bool(_matches_machine_hostname(host) and not _is_taken(port) if told is None else told)


def _is_taken(port: int) -> bool:
    """Whether a program on this host listens at a port. Another one may have taken it a moment later."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def endpoint_patience(torchrun: argparse.Namespace) -> float:
    """Seconds that torchrun would wait until the endpoint accepts connections."""
    static = torchrun.rdzv_backend == "static"
    name, usual = ("timeout", _TIMEOUT) if static else ("read_timeout", _READ_TIMEOUT)
    return float(_settings(torchrun).get(name, usual))


def last_call(torchrun: argparse.Namespace) -> float:
    """Seconds for which further hosts may come once the fewest have come."""
    return float(_settings(torchrun).get("last_call_timeout", _LAST_CALL))


def board(place: Endpoint) -> Any:
    """A store at the endpoint, by which hosts know who has arrived; a prefix keeps its keys apart from elastic's."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    try:
        store = TCPStore(place.host, place.port, is_master=False, timeout=_BOARD)
    except RuntimeError as error:
        raise UsageError(f"the hosts cannot meet at {place}: {first_line(error)}") from error
    return PrefixStore("autoddp", store)


def end_in_silence(place: Endpoint) -> None:
    """Let this process's connections to the store at `place` end if its host says nothing for two minutes.

    A question to a host that was switched off would else be waited for without an end.
    """
    if sys.platform != "linux":
        return
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                    if internet and connection.getpeername()[1] == place.port:
                        for option, value in _SILENCE.items():
                            connection.setsockopt(*option, value)


def run_tuning_job(torchrun: argparse.Namespace, folder: Path, number: int) -> str:
    """One attempt: the script's workers with this process's environment. Blocks; "" or why it failed.

    Elastic restarts nothing, because each attempt has to begin with the user's files as they are. Elastic's own lines
    go to the attempt's folder, as do the workers' stdout and stderr, one file per rank.
    """
    arguments = _beside_the_meeting_point(torchrun, f"tune{number}")
    arguments.standalone = False
    arguments.node_rank = 0
    arguments.master_port = torchrun.master_port or DEFAULT_PORT
    arguments.log_dir = str(folder)
    arguments.redirects, arguments.tee, arguments.local_ranks_filter = "3", "0", ""
    fresh = _FRESH_STORE if node_range(torchrun)[1] > 1 and _agents_share_one_store() else {}
    _follow_as_told()
    with _quiet_elastic(folder / "elastic.log"), environment_with(fresh):
        return _run_without_restarts(arguments)


def _run_without_restarts(arguments: argparse.Namespace) -> str:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args

    arguments.max_restarts = 0
    config, command, words = config_from_args(arguments)
    try:
        elastic_launch(config=config, entrypoint=command)(*words)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return f"rank {rank} ended with exit code {failure.exitcode}"
    return ""


def _agents_share_one_store() -> bool:
    """Whether the workers on several hosts get the store in which the agents meet, as in older versions of torch.

    There a rank may find the address at which another rank listened in the attempt before. In newer versions each start
    has a store of its own for the workers, which scripts may use before they make a process group.
    """
    from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

    return "server_port" not in inspect.signature(RendezvousStoreInfo.build).parameters


def ending_signals(torchrun: argparse.Namespace) -> frozenset[int]:
    """The usual signals that end a job, and those that the user's options add."""
    names = getattr(torchrun, "signals_to_handle", "").split(",")  # older versions of torch have no such option
    added = {getattr(signal, name.strip(), None) for name in names}
    settable = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    return frozenset(ENDING) | frozenset(number for number in added if number in settable)


def run_own_job(torchrun: argparse.Namespace, name: str, more: dict[str, str]) -> str:
    """A job of ours on the user's hosts, without restarts, with the variables `more`. Blocks; "" or why it failed.

    The workers' output goes where the user's options send it. UsageError for hosts that cannot meet; a signal ends this
    process as it would have ended the job.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    arguments = _other_rendezvous(torchrun, name)
    variables = for_own_workers(os.environ) | more
    if node_range(torchrun)[1] == 1:
        variables |= on_one_host(os.environ)
    with _quiet_elastic(None), _signal_handlers_kept(), environment_with(variables):
        try:
            with _rendezvous_errors(arguments):
                return _run_without_restarts(arguments)
        except SignalException as error:
            raise SystemExit(128 + error.sigval) from None  # the exit code that shells give


def meeting_point(torchrun: argparse.Namespace, name: str) -> Any:
    """A rendezvous handler at the job's own endpoint, where launchers meet before the job.

    The endpoint's store lives as long as this object, so that one job's end and the next one's start cannot race.
    """
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    arguments = _other_rendezvous(torchrun, name)
    fewest, most = node_range(torchrun)
    settings: dict[str, Any] = {"timeout": _TIMEOUT, **_settings(arguments), "local_addr": _identity(torchrun)}
    where = (arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.rdzv_id)
    parameters = RendezvousParameters(*where, min_nodes=fewest, max_nodes=most, **settings)
    with _rendezvous_errors(arguments):
        return get_rendezvous_handler(parameters)


def _identity(torchrun: argparse.Namespace) -> str:
    """A name that no other launcher at the meeting has; the launchers are numbered in the order of these names.

    Elastic would use the host's name and the process id, which may be equal on two hosts called localhost.
    """
    rank = f"{torchrun.node_rank:06}." if torchrun.rdzv_backend == "static" else ""
    return f"{rank}{socket.gethostname()}.{uuid.uuid4().hex}"


def connection_is_lost(error: Exception) -> bool:
    """Whether this error of a store means that its connection is broken, so that it can never be asked again."""
    from torch.distributed import DistNetworkError

    return isinstance(error, DistNetworkError | ConnectionError)


def meet(handler: Any, torchrun: argparse.Namespace, arrivals: Arrivals | None) -> Any:
    """Wait for all launchers at a meeting point; torch's RendezvousInfo (store, rank, world_size).

    None if the others have met already, and closed the meeting.
    """
    from torch.distributed.elastic.rendezvous import RendezvousError

    told = contextlib.nullcontext() if arrivals is None else arrivals.told(tell)
    # No store for workers: a meeting of launchers needs none, and the identity is no address at which it could be.
    with _rendezvous_errors(torchrun, arrivals), told, environment_with(_FRESH_STORE):
        try:
            return handler.next_rendezvous()
        except RendezvousError:
            if _is_closed(handler):
                return None
            raise


def _is_closed(handler: Any) -> bool:
    """Whether a rendezvous was closed; False if that cannot be learned."""
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        return bool(handler.is_closed())
    except RendezvousError:
        return False


@contextlib.contextmanager
def _rendezvous_errors(arguments: argparse.Namespace, arrivals: Arrivals | None = None) -> Iterator[None]:
    """Make an error of the rendezvous a UsageError of one line: it comes before anything is started."""
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        yield
    except (ValueError, ImportError, RendezvousError) as error:
        where = _rendezvous_words(arguments)
        came = f"; {so_far}" if arrivals is not None and (so_far := arrivals.so_far()) else ""
        raise UsageError(
            f"the hosts cannot meet ({where}): {first_line(error.__cause__ or error)}{came}: check both on every host"
        ) from None


def _rendezvous_words(arguments: argparse.Namespace) -> str:
    """The options that say where the hosts meet."""
    if arguments.rdzv_backend == "static" and not arguments.rdzv_endpoint:
        return (
            f"{_master_option(arguments)} {arguments.master_addr} --master-port {arguments.master_port or DEFAULT_PORT}"
        )
    conf = f" --rdzv-conf {arguments.rdzv_conf}" if arguments.rdzv_conf else ""
    return f"--rdzv-backend {arguments.rdzv_backend} --rdzv-endpoint {arguments.rdzv_endpoint or 'none'}{conf}"


def _master_option(torchrun: argparse.Namespace) -> str:
    """What names the master in messages: the option, with the variable of a cluster that it was taken from."""
    variable = getattr(torchrun, "master_from", "")  # `commandline.place` sets it
    return f"--master-addr (from {variable})" if variable else "--master-addr"


def _other_rendezvous(torchrun: argparse.Namespace, name: str) -> argparse.Namespace:
    """torchrun's arguments for a meeting of the same hosts under another run id.

    A static rendezvous becomes a dynamic one at the same endpoint: only in a dynamic one a restart on one node restarts
    the others. And the workers of a static job keep their keys in the endpoint's store, where the next job's workers
    would find them. One host alone gets a rendezvous that no other host can reach.
    """
    arguments = copy.copy(torchrun)
    if node_range(torchrun)[1] == 1:
        from autoddp.network import loopback

        loopback.register()
        arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.rdzv_conf = loopback.BACKEND, loopback.ADDRESS, ""
        arguments.rdzv_id = f"{uuid.uuid4()}.{name}"
        return arguments
    if torchrun.rdzv_backend == "static":
        arguments.rdzv_backend = "c10d"
        master = Endpoint(
            _master_option(torchrun), torchrun.master_addr.strip("[]"), torchrun.master_port or DEFAULT_PORT
        )
        arguments.rdzv_endpoint = torchrun.rdzv_endpoint or str(master)
        settings = {key: value for key, value in _settings(torchrun).items() if key not in _OF_C10D}
        settings["is_host"] = str(int(torchrun.node_rank == 0))
        settings.setdefault("join_timeout", f"{endpoint_patience(torchrun):.0f}")  # as long as torchrun would wait
        arguments.rdzv_conf = _conf(settings)
    arguments.rdzv_id = f"{torchrun.rdzv_id}.{name}"
    return arguments


def _beside_the_meeting_point(torchrun: argparse.Namespace, name: str) -> argparse.Namespace:
    """The options by which further processes meet on the same hosts.

    On several nodes this process, or another node's launcher, must keep the endpoint's store open meanwhile.
    """
    arguments = _other_rendezvous(torchrun, name)
    settings = _settings(arguments)
    if arguments.rdzv_backend == "c10d" and node_range(torchrun)[1] > 1:
        settings["is_host"] = "0"
    arguments.rdzv_conf = _conf(settings)
    return arguments


def _conf(settings: Mapping[str, str]) -> str:
    """--rdzv-conf with these settings."""
    return ",".join(f"{key}={value}" for key, value in settings.items())


def be_torchrun() -> None:
    """Run torchrun with this process's command line, which has the words of `meeting_words`; see `own_torchrun`."""
    from torch.distributed.run import main

    from autoddp.network import loopback

    loopback.register()
    _follow_as_told()
    main()


def _follow_as_told() -> None:
    if ahead := float(os.environ.get(_AHEAD, "0")):
        _follow(ahead)


def meeting_words(torchrun: argparse.Namespace, name: str) -> list[str]:
    """torchrun's options, as words of a command, by which further processes meet on the same hosts; no restarts."""
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


@contextlib.contextmanager
def _quiet_elastic(log: Path | None) -> Iterator[None]:
    """Send elastic's lines to `log`, or nowhere: the user sees them when the real job is started."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.distributed.run")]
    loggers += [logging.getLogger(n) for n in list(logging.root.manager.loggerDict) if n.startswith(loggers[0].name)]
    before = [(logger, list(logger.handlers), logger.propagate) for logger in loggers]
    if log:
        append(log, "")
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
    """Put the present handlers back: elastic leaves its own, which would raise its exception in our code."""
    present = {number: signal.getsignal(number) for number in ENDING}
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
