"""Before a multi-node job the launchers compare plans: the same recipe everywhere, or nothing is started."""

from __future__ import annotations

import argparse
from typing import Any

from autoddp.errors import UsageError
from autoddp.launch.elastic import meet, meeting_point


class Conference:
    """Holds the job's meeting point for as long as it lives; see `elastic.meeting_point`."""

    def __init__(self, torchrun: argparse.Namespace) -> None:
        self._torchrun = torchrun
        self._handler: Any = meeting_point(torchrun, "plan")

    def agree(self, plan: str, says: str) -> None:
        """`plan` must be the same on all nodes; `says` is how this node's plan reads in the error."""
        info = meet(self._handler, self._torchrun)
        store, rank, nodes = info.store, info.rank, info.world_size
        store.set(f"plan/{rank}", f"{plan}\n{says}")
        plans = [store.get(f"plan/{node}").decode().split("\n", 1) for node in range(nodes)]
        # Whoever hosts the store leaves last: the others still have to read.
        store.set(f"read/{rank}", "1")
        store.wait([f"read/{node}" for node in range(nodes)])
        self._handler.shutdown()
        other = next((node for node in range(nodes) if plans[node][0] != plan), None)
        if other is not None:
            raise UsageError(
                f"hosts differ: here {says}, on node {other} {plans[other][1]}; every host needs the same recipe: "
                "copy it to all, or name it with --recipe"
            )
