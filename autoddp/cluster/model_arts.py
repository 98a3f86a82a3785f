"""Huawei Cloud's ModelArts."""

from __future__ import annotations

from autoddp.cluster.base import Platform, Told


class ModelArts(Platform):
    """A node of a ModelArts training job."""

    name = "ModelArts"

    @property
    def detected(self) -> bool:
        return bool(self._text("MA_NUM_HOSTS"))

    @property
    def why(self) -> str:
        return self._seen("MA_NUM_HOSTS", "VC_TASK_INDEX")

    @property
    def nodes(self) -> Told | None:
        return self._nodes("MA_NUM_HOSTS")

    @property
    def node_rank(self) -> Told | None:
        return self._node_rank("VC_TASK_INDEX")

    @property
    def processes_per_node(self) -> Told | None:
        return self._processes("MA_NUM_GPUS")

    @property
    def master_address(self) -> Told | None:
        told = self._text("VC_WORKER_HOSTS")
        return Told(told.value.split(",")[0].strip(), told.variable) if told else None
