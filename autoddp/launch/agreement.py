"""Before a multi-node job the launchers meet: they compare plans and themselves, and find their network.

Errors are for what torchrun could not run either, and for hosts with different recipes. They come at most five seconds
after the last host has arrived, on all hosts alike.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Collection
from datetime import timedelta
from typing import Any

from autoddp.errors import UsageError
from autoddp.launch import elastic
from autoddp.launch.addresses import places_here
from autoddp.launch.gathering import Arrivals, say_if_not_ours, wait_for_answer
from autoddp.launch.hosts import Hosts
from autoddp.launch.interface_selection import choose, with_rdma
from autoddp.launch.local_fingerprint import may_have_gpus
from autoddp.launch.mode import torch_version
from autoddp.launch.network import Network
from autoddp.launch.preflight import HostFacts, compared, labels
from autoddp.log import tell
from autoddp.topology import interfaces
from autoddp.version import __version__

_ANSWER = timedelta(seconds=60)  # for one answer of another launcher, on a machine that is busy elsewhere


def confer(
    torchrun: argparse.Namespace, plan: str, reads: str, variables: Collection[str] = ()
) -> tuple[Conference, Network]:
    """Meet the other nodes' launchers: `plan` must be the same on all, and the network is chosen, if nobody did.

    `reads` is the plan for people, `variables` what the plan sets. `torchrun` is given the address by which the others
    reach this host, unless the user named one. The object returned keeps the meeting point open for the job.
    """
    ours = {address for nic in interfaces() for address in nic.addresses}
    elastic.host_endpoint_if_ours(torchrun, ours)
    conference = Conference(torchrun, ours)
    network = with_rdma(conference.agree(plan, reads), {*os.environ, *variables})
    if network.address and torchrun.local_addr is None:
        # torchrun would give the others this host's name, which may stand for 127.0.0.1 or another network.
        torchrun.local_addr = network.address
    return conference, network


class Conference:
    """Holds the job's meeting point for as long as it lives; see `elastic.meeting_point`.

    `ours` has this host's addresses.
    """

    def __init__(self, torchrun: argparse.Namespace, ours: set[str]) -> None:
        self._torchrun = torchrun
        endpoint = elastic.endpoint(torchrun)
        self._has_store = endpoint is not None and elastic.hosts_endpoint(torchrun)
        if endpoint is not None and not self._has_store:
            wait_for_answer(endpoint, elastic.endpoint_patience(torchrun), tell)
        elif endpoint is not None and torchrun.rdzv_backend == "static":
            say_if_not_ours(endpoint, ours, tell)
        self._handler: Any = elastic.meeting_point(torchrun, "plan")
        self._arrivals: Arrivals | None = None
        if endpoint is not None:
            board = elastic.board(endpoint)
            self._arrivals = Arrivals(board, endpoint, str(torchrun.rdzv_id), elastic.node_range(torchrun)[0])
        self.hosts = Hosts()
        """All launchers, once they have agreed."""

    def agree(self, plan: str, says: str) -> Network:
        """`plan` must be the same on all nodes; `says` is how this node's plan reads in the error.

        The way to this node. UsageError, with all errors in one line and the same on all nodes.
        """
        info = elastic.meet(self._handler, self._torchrun, self._arrivals)
        self._store, self._rank, self._nodes = info.store, info.rank, info.world_size
        self._store.set_timeout(_ANSWER)
        try:
            found, errors, warnings = self._compare(plan, says)
            self._leave()
        except (RuntimeError, ValueError) as error:
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise UsageError(f"another host has left the meeting, see its own last lines ({first})") from None
        self.hosts = Hosts(
            self._store,
            self._rank,
            self._nodes,
            fewest=elastic.node_range(self._torchrun)[0],
            name=self._labels[self._rank],
            endpoint=elastic.endpoint(self._torchrun),
        )
        if self._rank == 0:
            for warning in warnings:
                tell(f"warning: {warning}")
        if errors:
            raise UsageError("; ".join(errors))
        return found

    def _compare(self, plan: str, says: str) -> tuple[Network, list[str], list[str]]:
        self._exchange("arrived", True)  # so that all read their clocks now
        hosts = [HostFacts.of(plain) for plain in self._exchange("host", self._facts(plan, says).plain)]
        errors, warnings = compared(hosts)
        self._labels = labels(hosts)
        found = choose(
            self._exchange, self._rank, self._labels, places_here(self._torchrun.local_addr, may_have_gpus(os.environ))
        )
        return found.network, errors + found.faults, warnings + found.doubts

    def _facts(self, plan: str, says: str) -> HostFacts:
        static = self._torchrun.rdzv_backend == "static"
        return HostFacts(
            name=socket.gethostname(),
            plan=plan,
            reads=says,
            nodes=str(self._torchrun.nnodes),
            node_rank=self._torchrun.node_rank if static else None,
            processes=elastic.processes_per_node(self._torchrun),
            torch=torch_version(),
            autoddp=__version__,
            clock=time.time(),
        )

    def _exchange(self, key: str, mine: Any) -> list[Any]:
        """What every launcher says under a key, by node."""
        self._store.set(f"{key}/{self._rank}", json.dumps(mine))
        return [json.loads(self._store.get(f"{key}/{node}")) for node in range(self._nodes)]

    def _leave(self) -> None:
        self._handler.shutdown()
        self._store.set(f"read/{self._rank}", "1")
        if self._has_store:  # it ends with this process, and the others still have to read
            self._store.wait([f"read/{node}" for node in range(self._nodes)])
