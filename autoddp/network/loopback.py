"""A rendezvous for our own jobs on one host: nothing that it opens can be reached from another host.

torchrun's c10d rendezvous keeps a TCP store that listens on all interfaces, asks for no password, and whose content the
launcher unpickles: whoever connects to it can run code as this user. One host alone needs no such store. The launcher's
own store is in its memory here, and the one in which the ranks meet listens on 127.0.0.1.

    register()                                  # then elastic knows --rdzv-backend autoddp-loopback
"""

from __future__ import annotations

import os
import socket

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "autoddp-loopback"
"""For --rdzv-backend, after `register()`."""
ADDRESS = "127.0.0.1"
_BACKLOG = 2048  # connections that wait to be accepted, as in torch's own store


def register() -> None:
    """Make the rendezvous known to torch elastic in this process. May be called again."""
    rendezvous_handler_registry.register(BACKEND, LoopbackRendezvous)


class LoopbackRendezvous(RendezvousHandler):
    """The rendezvous of one agent, which is therefore rank 0 of 1 and waits for nobody."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._agents = HashStore()
        self._ranks: TCPStore | None = None

    def get_backend(self) -> str:
        """See base class."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks meet in the agent's store: unless the user has switched that off, as in torch."""
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class."""
        if self.use_agent_store and self._ranks is None:
            self._ranks = store_on_loopback()
        port = _free_port() if self._ranks is None else self._ranks.port
        return RendezvousInfo(self._agents, 0, 1, RendezvousStoreInfo(ADDRESS, port))

    def is_closed(self) -> bool:
        """See base class."""
        return False

    def set_closed(self) -> None:
        """See base class."""

    def num_nodes_waiting(self) -> int:
        """See base class."""
        return 0

    def get_run_id(self) -> str:
        """See base class."""
        return self._run_id

    def shutdown(self) -> bool:
        """See base class."""
        return True


def store_on_loopback() -> TCPStore:
    """A store that no other host can reach: torch binds its stores to all interfaces, so the socket is made here."""
    listening = socket.create_server((ADDRESS, 0), backlog=_BACKLOG)
    port, given = int(listening.getsockname()[1]), listening.detach()
    # The newer kind of store takes no socket in torch 2.6.
    return TCPStore(ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=given, use_libuv=False)


def _free_port() -> int:
    """A free port, for a store that rank 0 makes itself."""
    with socket.create_server((ADDRESS, 0)) as free:
        return int(free.getsockname()[1])
