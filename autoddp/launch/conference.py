"""Before a multi-node job the launchers compare plans (the same recipe on all, or nothing) and find their network."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection
from typing import Any

from autoddp.errors import UsageError
from autoddp.launch.choosing import choose, with_rdma
from autoddp.launch.elastic import host_endpoint_if_ours, meet, meeting_point
from autoddp.launch.hosts import Hosts
from autoddp.launch.network import VARIABLES, Network
from autoddp.topology import interfaces


def confer(
    torchrun: argparse.Namespace, plan: str, reads: str, variables: Collection[str] = ()
) -> tuple[Conference, Network]:
    """Meet the other nodes' launchers: `plan` must be the same on all, and the network is chosen, if nobody did.

    `reads` is the plan for people, `variables` what the plan sets. `torchrun` is given the chosen address, unless the
    user named one. The object returned keeps the meeting point open for the job.
    """
    host_endpoint_if_ours(torchrun, {address for nic in interfaces() for address in nic.addresses})
    conference = Conference(torchrun)
    is_set = any(name in os.environ for name in VARIABLES)
    network = with_rdma(conference.agree(plan, reads, network_is_set=is_set), {*os.environ, *variables})
    if network.interface and torchrun.local_addr is None:
        # torchrun would give the others this host's name, which may stand for 127.0.0.1 or another network.
        torchrun.local_addr = network.address
    return conference, network


class Conference:
    """Holds the job's meeting point for as long as it lives; see `elastic.meeting_point`."""

    def __init__(self, torchrun: argparse.Namespace) -> None:
        self._torchrun = torchrun
        self._handler: Any = meeting_point(torchrun, "plan")
        self.hosts = Hosts()
        """All launchers, once they have agreed."""

    def agree(self, plan: str, says: str, network_is_set: bool) -> Network:
        """`plan` must be the same on all nodes; `says` is how this node's plan reads in the error.

        The network to use, unless it is set on some node.
        """
        info = meet(self._handler, self._torchrun)
        store, rank, nodes = info.store, info.rank, info.world_size
        self.hosts = Hosts(store, rank, nodes)
        store.set(f"plan/{rank}", f"{plan}\n{says}\n{int(network_is_set)}")
        plans = [store.get(f"plan/{node}").decode().split("\n") for node in range(nodes)]
        other = next((node for node in range(nodes) if plans[node][0] != plan), None)
        try:
            if other is not None or any(int(is_set) for _, _, is_set in plans):
                network = Network()
            else:
                network = choose(store, rank, nodes)
        finally:
            self._leave(store, rank, nodes)
        if other is not None:
            raise UsageError(
                f"hosts differ: here {says}, on node {other} {plans[other][1]}; every host needs the same recipe, "
                "and the same .unfit note beside it or none: copy both to all, or name the recipe with --recipe"
            )
        return network

    def _leave(self, store: Any, rank: int, nodes: int) -> None:
        # Whoever hosts the store leaves last: the others still have to read.
        store.set(f"read/{rank}", "1")
        store.wait([f"read/{node}" for node in range(nodes)])
        self._handler.shutdown()
