"""torchrun's options as torch reads them: how many ranks and hosts a job has, and where the hosts meet."""

from __future__ import annotations

import argparse
import contextlib
import copy
import errno
import importlib.util
import os
import re
import signal
import socket
import uuid
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from autoddp.errors import UsageError, first_line
from autoddp.network.gathering import Arrivals, Endpoint
from autoddp.processes.signals import ENDING
from autoddp.torchrun.surroundings import quiet_elastic

TIMEOUT = 900  # seconds; torchrun's own for a static rendezvous, where --rdzv-conf names none
_LAST_CALL = 30  # seconds; torch's own, likewise
_JOIN_TIMEOUT = 600  # seconds; torch's own for c10d, likewise
_READ_TIMEOUT = 60  # seconds; torch's own for c10d, likewise
LOOKS = 0.1  # seconds between two looks of elastic at ranks that are not the real job's; torch's own default
_LONGEST_SLEEP = 1e9  # seconds; time.sleep refuses some more
OLDEST_TORCH = (2, 6)
"""The oldest version with which a job was tuned; `campaigns/versions.py` tries it and newer ones."""
DEFAULT_PORT = 29500  # torchrun's, for a static rendezvous without --master-port
_C10D_PORT = 29400  # torch's own, for a c10d rendezvous whose endpoint names none
_OF_C10D = ("store_type", "is_host", "read_timeout")
"""Settings that a static rendezvous does not read."""
_OF_ETCD = ("etcd", "etcd-v2")
"""torch's backends that need a library, which has the name of the first."""


def load_torchrun() -> None:
    """Import all that torchrun itself imports. UsageError if this torch is too old."""
    import torch.distributed.run

    found = torch.__version__
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise UsageError(f"this is torch {found}, and autoddp needs torch {oldest} or newer: pip install -U torch")


def torchrun_parser() -> argparse.ArgumentParser:
    """The installed torch's own parser, fresh. UsageError for a variable that it cannot read."""
    from torch.distributed.run import get_args_parser

    try:
        parser: argparse.ArgumentParser = get_args_parser()
    except ValueError as error:  # it takes variables in place of switches for whole numbers, and says only which value
        theirs = ((name, value) for name, value in os.environ.items() if name.startswith("PET_"))
        bad = [f"{name}={value}" for name, value in theirs if str(error).endswith(f": {value!r}")]
        if not bad:
            raise
        raise UsageError(f"{bad[0]}: must be 1 or 0") from None
    parser.prog = "autoddp"
    return parser


def variables_of_torchrun() -> set[str]:
    """The environment variables that torchrun reads in place of options, such as PET_NNODES. See `torchrun_parser`."""
    from torch.distributed.argparse_util import check_env, env

    return {f"PET_{one.dest.upper()}" for one in torchrun_parser()._actions if isinstance(one, env | check_env)}


def rendezvous_settings(arguments: argparse.Namespace) -> dict[str, str]:
    """--rdzv-conf as torch reads it."""
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

    return dict(_parse_rendezvous_config(arguments.rdzv_conf))


def processes_per_node(torchrun: argparse.Namespace) -> int:
    """How many ranks this node starts; torch's ValueError for an unknown value of --nproc-per-node."""
    from torch.distributed.run import determine_local_world_size

    with quiet_elastic(None):
        return int(determine_local_world_size(torchrun.nproc_per_node))


def node_range(torchrun: argparse.Namespace) -> tuple[int, int]:
    """Fewest and most nodes. Under a static rendezvous torch waits for the most, whatever the fewest are.

    Under --standalone no other node can come, because torch takes any free port, and a run id that nobody knows.
    """
    from torch.distributed.run import parse_min_max_nnodes

    fewest, most = parse_min_max_nnodes(torchrun.nnodes)
    if torchrun.standalone and 1 <= fewest <= most:
        return int(fewest), int(fewest)
    waits_for_all = torchrun.rdzv_backend == "static" and 1 <= fewest <= most
    return int(most if waits_for_all else fewest), int(most)


def nodes_and_ranks(torchrun: argparse.Namespace) -> tuple[int, int, int]:
    """Fewest and most nodes, and the ranks on this one. UsageError for numbers with which no job can start."""
    try:
        fewest, most = node_range(torchrun)
    except (ValueError, RuntimeError):
        fewest, most = 0, 0
    if not 1 <= fewest <= most:
        raise UsageError(f"--nnodes {torchrun.nnodes}: must be 1 or more, or a range such as 1:4")
    ranks = f"--nproc-per-node {torchrun.nproc_per_node}"
    try:
        here = processes_per_node(torchrun)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"{ranks}: {first_line(error).rstrip('.')}; give a number of ranks, or auto") from None
    if here < 1:
        raise UsageError(f"{ranks}: must be 1 or more, e.g. --nproc-per-node 2")
    return fewest, most, here


FORKED = "--start-method fork copies the launcher for each rank, and autoddp gets into no copy"
"""Why nothing of autoddp gets into such a rank; see `forks_ranks`."""


def forks_ranks(torchrun: argparse.Namespace) -> bool:
    """Whether ranks are forked: then none of them imports `inject/sitecustomize.py`, which arms the worker."""
    return bool(torchrun.run_path) and torchrun.start_method == "fork"


def other_program(torchrun: argparse.Namespace) -> list[str]:
    """The words that start a rank where that is not this Python, as under `--no-python` or by PYTHON_EXEC; else []."""
    words = [torchrun.training_script, *torchrun.training_script_args]
    if torchrun.no_python:
        return words
    python = "" if torchrun.run_path else os.environ.get("PYTHON_EXEC", "")
    return [python, "-u", *(["-m"] if torchrun.module else []), *words] if python else []


def ending_signals(torchrun: argparse.Namespace) -> frozenset[int]:
    """The usual signals that end a job, and those that the user's options add."""
    names = getattr(torchrun, "signals_to_handle", "").split(",")  # older versions of torch have no such option
    added = {getattr(signal, name.strip(), None) for name in names}
    settable = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    return frozenset(ENDING) | frozenset(number for number in added if number in settable)


def require_job_options(torchrun: argparse.Namespace) -> None:
    """UsageError for a value that torch judges only when the job starts, which may be after minutes of tuning.

    Tuning does without most of these options, see `jobs.run_tuning_job`; with another one no attempt can begin either.
    """
    from torch.distributed.elastic.multiprocessing import Std

    for option, value in (("--redirects", torchrun.redirects), ("--tee", torchrun.tee)):
        try:
            Std.from_str(value)
        except ValueError:
            rule = "must be 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both), or such a number for local ranks"
            raise UsageError(f"{option} {value}: {rule}, e.g. {option} 0:3,1:1") from None
    ranks = torchrun.local_ranks_filter
    if ranks and not all(re.fullmatch(r"\s*[0-9]+\s*", rank) for rank in ranks.split(",")):
        raise UsageError(f"--local-ranks-filter {ranks}: must be numbers of local ranks, e.g. --local-ranks-filter 0,1")
    if torchrun.max_restarts < 0:
        raise UsageError(f"--max-restarts {torchrun.max_restarts}: must be a whole number of 0 or more")
    if not 0 < torchrun.monitor_interval <= _LONGEST_SLEEP:  # false for NaN too
        rule = "must be a number of seconds above 0, e.g. --monitor-interval 0.1"
        raise UsageError(f"--monitor-interval {torchrun.monitor_interval}: {rule}")
    patience = getattr(torchrun, "shutdown_timeout", None)  # older versions of torch have no such option
    if patience is not None and patience < 0:
        raise UsageError(f"--shutdown-timeout {patience}: must be a whole number of 0 or more")
    _require_handler(getattr(torchrun, "event_log_handler", "null"))  # since torch 2.8
    if torchrun.logs_specs is not None:
        _require_logs_specs(torchrun.logs_specs)
    if torchrun.log_dir and torchrun.log_dir != os.devnull and torchrun.logs_specs is None:
        _require_folder(torchrun.log_dir)


def _require_handler(name: str) -> None:
    """UsageError for a handler of events that torch has not. It looks one up only when the first rank has started."""
    from torch.distributed.elastic.events.handlers import get_logging_handler

    try:
        get_logging_handler(name)
    except KeyError:
        raise UsageError(f"--event-log-handler {name}: torch has none of this name; null is the usual one") from None


def _require_logs_specs(name: str) -> None:
    """UsageError for logs specs that no package here registers."""
    known = metadata.entry_points(group="torchrun.logs_specs").names
    if name not in known:
        names = f"one of {', '.join(sorted(known))}" if known else "left out: no package here registers any"
        raise UsageError(f"--logs-specs {name}: must be {names}")


def _require_folder(log_dir: str) -> None:
    """UsageError where the folder for logs takes none, or cannot be made. Makes nothing."""
    there = log_dir
    while there and not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there or os.curdir) or not os.access(there or os.curdir, os.W_OK | os.X_OK):
        raise UsageError(f"--log-dir {log_dir}: {there or os.curdir} is no folder that takes files; name another one")


def require_rendezvous(torchrun: argparse.Namespace, *, starts_job: bool = True) -> None:
    """UsageError for a rendezvous that can come to nothing, whatever other hosts do. Connects to nothing.

    torch's own code judges the options, with a store in this process in the place of the one at the endpoint. The port
    of several hosts is looked at when they meet, see `require_free_port`; that of one host is for the job alone, since
    attempts meet elsewhere, see `other_rendezvous`.
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

    fewest, most = node_range(torchrun)
    if torchrun.standalone and fewest > 1:
        raise UsageError(f"--standalone is for a job on one host, and --nnodes {torchrun.nnodes} needs {fewest}")
    by_address = torchrun.rdzv_backend == "static" and not torchrun.rdzv_endpoint
    if torchrun.standalone or (by_address and most == 1 and torchrun.master_port is None):
        torchrun = copy.copy(torchrun)  # torchrun takes this one, and reads --rdzv-conf for it all the same
        torchrun.rdzv_backend, torchrun.rdzv_endpoint, torchrun.rdzv_id = "c10d", "localhost:0", "autoddp"
    backend, where = torchrun.rdzv_backend, torchrun.rdzv_endpoint
    if backend == "static" and not where:
        where = f"{torchrun.master_addr}:{_master_port(torchrun)}"
    try:
        settings: dict[str, Any] = rendezvous_settings(torchrun)
        if backend == "static":
            settings["rank"] = torchrun.node_rank
        if most > 1 and not torchrun.rdzv_id:  # torch makes one, which on one host is as good
            raise ValueError("--rdzv-id is empty, and each host would make one of its own: give the same on all")
        # With an address torch does not ask the name service for this host's name, which may take seconds.
        place = (backend, where, torchrun.rdzv_id or "autoddp", fewest, most, torchrun.local_addr or "localhost")
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
        is_ours = backend == "static" and most == 1 and starts_job
        if is_ours and _is_taken(parse_rendezvous_endpoint(where, DEFAULT_PORT)[1]):
            # torchrun would find out at its start. Here that may be minutes of tuning later.
            raise ValueError("another program on this host has the port: end it, or give another port")
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
    with rendezvous_errors(torchrun):
        host, _ = parse_rendezvous_endpoint(torchrun.rdzv_endpoint, _C10D_PORT)
    try:
        ours = bool({found[4][0] for found in socket.getaddrinfo(host, None)} & addresses)
    except (OSError, UnicodeError):  # the latter for what can be no name, such as .cluster.local
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

    arguments = other_rendezvous(torchrun, "")
    if arguments.rdzv_backend != "c10d":
        return None
    with rendezvous_errors(torchrun):
        settings: dict[str, Any] = rendezvous_settings(arguments)
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


def require_free_port(place: Endpoint) -> None:
    """UsageError if another program has the port of an endpoint that this node is to keep."""
    if _is_taken(place.port):
        flag = "--rdzv-endpoint" if place.option == "--rdzv-endpoint" else "--master-port"
        raise UsageError(
            f"the hosts cannot meet at {place.option} {place}: another program on this host ({socket.gethostname()}) "
            f"has port {place.port}: end it, or give another port by {flag}, on every host the same"
        )


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
    name, usual = ("timeout", TIMEOUT) if static else ("read_timeout", _READ_TIMEOUT)
    return float(rendezvous_settings(torchrun).get(name, usual))


def patience_with_hosts(torchrun: argparse.Namespace) -> float:
    """Seconds that this host waits at the endpoint until the fewest hosts have come, see `other_rendezvous`."""
    usual = endpoint_patience(torchrun) if torchrun.rdzv_backend == "static" else _JOIN_TIMEOUT
    return float(rendezvous_settings(torchrun).get("join_timeout", usual))


def last_call(torchrun: argparse.Namespace) -> float:
    """Seconds for which further hosts may come once the fewest have come."""
    return float(rendezvous_settings(torchrun).get("last_call_timeout", _LAST_CALL))


def other_rendezvous(torchrun: argparse.Namespace, name: str) -> argparse.Namespace:
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
        master = Endpoint(_master_option(torchrun), torchrun.master_addr.strip("[]"), _master_port(torchrun))
        arguments.rdzv_endpoint = torchrun.rdzv_endpoint or str(master)
        settings = {key: value for key, value in rendezvous_settings(torchrun).items() if key not in _OF_C10D}
        settings["is_host"] = str(int(torchrun.node_rank == 0))
        settings.setdefault("join_timeout", f"{endpoint_patience(torchrun):.0f}")  # as long as torchrun would wait
        arguments.rdzv_conf = _conf(settings)
    arguments.rdzv_id = f"{torchrun.rdzv_id}.{name}"
    return arguments


def beside_the_meeting_point(torchrun: argparse.Namespace, name: str) -> argparse.Namespace:
    """The options by which further processes meet on the same hosts.

    On several nodes this process, or another node's launcher, must keep the endpoint's store open meanwhile.
    """
    arguments = other_rendezvous(torchrun, name)
    settings = rendezvous_settings(arguments)
    if arguments.rdzv_backend == "c10d" and node_range(torchrun)[1] > 1:
        settings["is_host"] = "0"
    arguments.rdzv_conf = _conf(settings)
    return arguments


def meeting_words(torchrun: argparse.Namespace, name: str) -> list[str]:
    """torchrun's options, as words of a command, by which further processes meet on the same hosts; no restarts."""
    arguments = beside_the_meeting_point(torchrun, name)
    words = {
        "--nnodes": torchrun.nnodes,
        "--nproc-per-node": str(torchrun.nproc_per_node),
        "--rdzv-backend": arguments.rdzv_backend,
        "--rdzv-endpoint": arguments.rdzv_endpoint,
        "--rdzv-id": arguments.rdzv_id,
        "--rdzv-conf": arguments.rdzv_conf,
        "--local-addr": torchrun.local_addr,
        "--max-restarts": "0",
        "--monitor-interval": str(min(torchrun.monitor_interval, LOOKS)),
    }
    return [word for option, value in words.items() if value for word in (option, value)]


def _conf(settings: Mapping[str, str]) -> str:
    """The value of --rdzv-conf that says these settings."""
    return ",".join(f"{key}={value}" for key, value in settings.items())


@contextlib.contextmanager
def rendezvous_errors(arguments: argparse.Namespace, arrivals: Arrivals | None = None) -> Iterator[None]:
    """Make an error of the rendezvous a UsageError of one line: it comes before anything is started."""
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError

    try:
        yield
    except (ValueError, ImportError, RendezvousError) as error:
        where = _rendezvous_words(arguments)
        came = f"; {so_far}" if arrivals is not None and (so_far := arrivals.so_far()) else ""
        late = isinstance(error, RendezvousTimeoutError)  # which has no text
        why = "not all of them came in time" if late else first_line(error.__cause__ or error).rstrip(".")
        raise UsageError(f"the hosts cannot meet ({where}): {why}{came}; check these options on every host") from None


def _rendezvous_words(arguments: argparse.Namespace) -> str:
    """The options that say where the hosts meet."""
    if arguments.rdzv_backend == "static" and not arguments.rdzv_endpoint:
        return f"{_master_option(arguments)} {arguments.master_addr} --master-port {_master_port(arguments)}"
    conf = f" --rdzv-conf {arguments.rdzv_conf}" if arguments.rdzv_conf else ""
    return f"--rdzv-backend {arguments.rdzv_backend} --rdzv-endpoint {arguments.rdzv_endpoint or 'none'}{conf}"


def _master_port(torchrun: argparse.Namespace) -> int:
    """The port of a static rendezvous. 0 is a port that was given: torchrun takes any free one."""
    return DEFAULT_PORT if torchrun.master_port is None else int(torchrun.master_port)


def _master_option(torchrun: argparse.Namespace) -> str:
    """What names the master in messages: the option, with the variable of a cluster that it was taken from."""
    variable = getattr(torchrun, "master_from", "")  # `commandline.place` sets it
    return f"--master-addr (from {variable})" if variable else "--master-addr"
