"""The single point of contact with torch elastic: its parser, the real job, and the tuning job beside it."""

from __future__ import annotations

import argparse
import contextlib
import copy
import logging
import os
import signal
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoddp.errors import UsageError

_FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Each start of the workers on several hosts gets a store of its own. Their launchers keep one store for all attempts,
and there a rank may find the address under which its peer listened in the attempt before (torch 2.13). On one host each
attempt's agent has a store of its own, as under torchrun, and scripts may use it before they make a process group."""
AGENTS_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}
"""Our own workers meet in the store before they make a process group, so it must not be one that rank 0 makes there."""
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
    host, _ = parse_rendezvous_endpoint(torchrun.rdzv_endpoint, DEFAULT_PORT)
    try:
        ours = socket.gethostbyname(host) in addresses
    except OSError:
        return  # the meeting will say so
    try:
        known = _matches_machine_hostname(host)
    except OSError:
        known = False  # this host's own name has no address at all
    if ours and not known:
        torchrun.rdzv_conf = ",".join(filter(None, [torchrun.rdzv_conf, "is_host=1"]))


def run_tuning_job(torchrun: argparse.Namespace, folder: Path, number: int) -> str:
    """One attempt: the script's workers with this process's environment. Blocks; "" or why it failed.

    Elastic restarts nothing: another attempt is to find the user's files as they are. Whatever elastic says meanwhile
    goes to the attempt's folder, as do the workers' stdout and stderr, one file per rank.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args

    arguments = _tuning_arguments(torchrun, folder, f"tune{number}")
    fresh = _FRESH_STORE if node_range(torchrun)[1] > 1 else {}
    with _quiet_elastic(folder / "elastic.log"), environment_with(fresh):
        config, command, words = config_from_args(arguments)
        try:
            elastic_launch(config=config, entrypoint=command)(*words)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            return f"rank {rank} ended with exit code {failure.exitcode}"
    return ""


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
            raise SystemExit(128 + error.sigval) from None
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
    config = {"timeout": 900, **_parse_rendezvous_config(arguments.rdzv_conf)}
    parameters = RendezvousParameters(
        backend=arguments.rdzv_backend,
        endpoint=arguments.rdzv_endpoint,
        run_id=arguments.rdzv_id,
        min_nodes=fewest,
        max_nodes=most,
        local_addr=arguments.local_addr,
        **config,
    )
    with _rendezvous_errors(arguments):
        return get_rendezvous_handler(parameters)


def meet(handler: Any, torchrun: argparse.Namespace) -> Any:
    """Wait for all launchers at a meeting point; torch's RendezvousInfo (store, rank, world_size)."""
    with _rendezvous_errors(torchrun):
        return handler.next_rendezvous()


@contextlib.contextmanager
def _rendezvous_errors(arguments: argparse.Namespace) -> Iterator[None]:
    """Hosts that cannot meet are the user's to mend: one line, as long as nothing has been started."""
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        yield
    except (ValueError, RendezvousError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        where = f"--rdzv-backend {arguments.rdzv_backend} --rdzv-endpoint {arguments.rdzv_endpoint or 'none'}"
        raise UsageError(f"the hosts cannot meet ({where}): {first} Check both on every host") from None


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
        arguments.rdzv_endpoint = torchrun.rdzv_endpoint or (
            f"{torchrun.master_addr}:{torchrun.master_port or DEFAULT_PORT}"
        )
        is_host = f"is_host={'1' if torchrun.node_rank == 0 else '0'}"
        arguments.rdzv_conf = ",".join(filter(None, [torchrun.rdzv_conf, is_host]))
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
