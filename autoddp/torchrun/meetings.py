"""Meetings of launchers, by torch's rendezvous and its store."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import stat
import sys
import uuid
from datetime import timedelta
from typing import Any

from autoddp.errors import UsageError, first_line
from autoddp.log import tell
from autoddp.network.gathering import Arrivals, Endpoint
from autoddp.torchrun.options import TIMEOUT, node_range, other_rendezvous, rendezvous_errors, rendezvous_settings
from autoddp.torchrun.surroundings import FRESH_STORE, environment_with

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
_RETURN = (
    {
        # TCP_RTO_MAX_MS, in milliseconds, since Linux 6.15. With 5 s a connection ends after a minute where it is this
        # host's own interface that is down, whatever the next option says; with 10 s it does after two.
        (socket.IPPROTO_TCP, 44): 10_000,
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 120_000,
    }
    if sys.platform == "linux"
    else {}
)
"""Options of sockets, with which what was lost is sent again so often, however long a link was down.

Without them the pause doubles each time: after a minute without a link nothing is sent for the next 40 seconds, in
which the others give this host up.
"""


class Unheard(TimeoutError):
    """A launcher that elastic has counted says nothing to the others, but the store answers."""


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

    A question to a host that was switched off would else be waited for without an end. One whose link was down goes on
    soon after it is up, and so does the answer of a store that this process keeps.
    """
    if sys.platform != "linux":
        return
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    _end_one_in_silence(connection, place.port)


def _end_one_in_silence(connection: socket.socket, port: int) -> None:
    """Set the options of one socket, if it is of the store at `port`; OSError where it has no peer.

    One that listens at the port is the store's own: connections that it takes later have its options.
    """
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    is_the_stores = connection.getsockname()[1] == port
    if is_the_stores or connection.getpeername()[1] == port:
        for option, value in (_RETURN if is_the_stores else _SILENCE | _RETURN).items():
            connection.setsockopt(*option, value)


def meeting_point(torchrun: argparse.Namespace, name: str) -> Any:
    """A rendezvous handler at the job's own endpoint, where launchers meet before the job.

    The endpoint's store lives as long as this object, so that one job's end and the next one's start cannot race.
    """
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    arguments = other_rendezvous(torchrun, name)
    fewest, most = node_range(torchrun)
    settings: dict[str, Any] = {"timeout": TIMEOUT, **rendezvous_settings(arguments), "local_addr": _identity(torchrun)}
    where = (arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.rdzv_id)
    parameters = RendezvousParameters(*where, min_nodes=fewest, max_nodes=most, **settings)
    with rendezvous_errors(arguments):
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

    None if the others have met already, and closed the meeting. Unheard if the first of them says nothing.
    """
    from torch.distributed import DistStoreError
    from torch.distributed.elastic.rendezvous import RendezvousError

    told = contextlib.nullcontext() if arrivals is None else arrivals.told(tell)
    # No store for workers: a meeting of launchers needs none, and the identity is no address at which it could be.
    with rendezvous_errors(torchrun, arrivals), told, environment_with(FRESH_STORE):
        try:
            return handler.next_rendezvous()
        except DistStoreError as error:  # all wait for its address
            raise Unheard(f"node 0 does not answer ({first_line(error)})") from None
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
