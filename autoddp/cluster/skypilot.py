"""SkyPilot."""

from __future__ import annotations

from autoddp.cluster.base import Platform, Told


class SkyPilot(Platform):
    """The `run` command of a SkyPilot task, which runs once on each node."""

    name = "SkyPilot"
    names_last = True

    @property
    def detected(self) -> bool:
        return bool(self._text("SKYPILOT_NODE_RANK") and self._text("SKYPILOT_NODE_IPS"))

    @property
    def why(self) -> str:
        return self._seen("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK")

    @property
    def nodes(self) -> Told | None:
        addresses = str(len(self._addresses()))
        return self._nodes("SKYPILOT_NUM_NODES") or Told(addresses, "SKYPILOT_NODE_IPS")

    @property
    def node_rank(self) -> Told | None:
        return self._node_rank("SKYPILOT_NODE_RANK")

    @property
    def processes_per_node(self) -> Told | None:
        return self._processes("SKYPILOT_NUM_GPUS_PER_NODE")

    @property
    def master_address(self) -> Told | None:
        return Told(self._addresses()[0], "SKYPILOT_NODE_IPS")

    @property
    def run_id(self) -> Told | None:
        return self._file_name("SKYPILOT_TASK_ID")

    def _addresses(self) -> list[str]:
        """The nodes' addresses, one a line, the first node's first."""
        return self._variables["SKYPILOT_NODE_IPS"].split()
