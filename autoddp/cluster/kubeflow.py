"""Kubeflow's TrainJob and PyTorchJob, whose variables torchrun's own parser reads."""

from __future__ import annotations

from autoddp.cluster.base import Platform, Told


class Kubeflow(Platform):
    """A pod of a job with one launcher per pod.

    The variables PET_* are torchrun's, and anybody may set them. They are Kubeflow's where Kubernetes runs the pod.
    WORLD_SIZE and RANK, which a PyTorchJob has too, count nodes or ranks depending on its version: they are not read.
    """

    name = "Kubeflow"

    @property
    def detected(self) -> bool:
        return bool(self._text("KUBERNETES_SERVICE_HOST") and self._text("PET_NNODES"))

    @property
    def why(self) -> str:
        return self._seen("PET_NNODES", "PET_NODE_RANK")

    @property
    def nodes(self) -> Told | None:
        return self._text("PET_NNODES")

    @property
    def node_rank(self) -> Told | None:
        return self._text("PET_NODE_RANK")

    @property
    def processes_per_node(self) -> Told | None:
        return self._text("PET_NPROC_PER_NODE")

    @property
    def master_address(self) -> Told | None:
        return self._text("PET_MASTER_ADDR")

    @property
    def master_port(self) -> Told | None:
        return self._text("PET_MASTER_PORT")


class OlderPyTorchJob(Platform):
    """A pod of a PyTorchJob that sets no PET_*. What WORLD_SIZE counts depends on the version, so it tells nothing."""

    name = "a PyTorchJob without PET_*"

    @property
    def detected(self) -> bool:
        needed = ("KUBERNETES_SERVICE_HOST", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
        others = ("LOCAL_RANK", "PET_NNODES")
        return all(map(self._text, needed)) and not any(map(self._text, others))

    @property
    def why(self) -> str:
        return self._seen("MASTER_ADDR", "RANK", "WORLD_SIZE")
