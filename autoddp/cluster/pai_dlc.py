"""Alibaba Cloud's PAI-DLC."""

from __future__ import annotations

import re

from autoddp.cluster.base import Platform, Told


class PaiDlc(Platform):
    """A node of a PyTorch job of PAI-DLC. There WORLD_SIZE counts nodes, and RANK is the node's number.

    Elsewhere these two count ranks, so they are believed only where the master's name is one that DLC gives.
    """

    name = "PAI-DLC"

    @property
    def detected(self) -> bool:
        master = self._text("MASTER_ADDR")
        is_named = master is not None and re.fullmatch(r"dlc\w+-master-0(\..*)?", master.value) is not None
        return is_named and not self._text("LOCAL_RANK")

    @property
    def why(self) -> str:
        return self._seen("MASTER_ADDR", "WORLD_SIZE", "RANK")

    @property
    def nodes(self) -> Told | None:
        return self._nodes("WORLD_SIZE")

    @property
    def node_rank(self) -> Told | None:
        return self._node_rank("RANK")

    @property
    def processes_per_node(self) -> Told | None:
        return self._processes("NPROC_PER_NODE")

    @property
    def master_address(self) -> Told | None:
        return self._text("MASTER_ADDR")

    @property
    def master_port(self) -> Told | None:
        return self._port("MASTER_PORT")
