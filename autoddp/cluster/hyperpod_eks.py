"""SageMaker HyperPod on EKS."""

from __future__ import annotations

from autoddp.cluster.base import Platform, Told


class HyperPodEks(Platform):
    """A pod whose manifest sets NNODES and NPROC_PER_NODE, as HyperPod's examples do. It tells no rank and no master.

    Scripts set variables of these names too, so they are believed only in a pod.
    """

    name = "HyperPod on EKS"

    @property
    def detected(self) -> bool:
        return all(map(self._text, ("KUBERNETES_SERVICE_HOST", "NNODES", "NPROC_PER_NODE")))

    @property
    def why(self) -> str:
        return self._seen("NNODES", "NPROC_PER_NODE")

    @property
    def nodes(self) -> Told | None:
        return self._nodes("NNODES")

    @property
    def processes_per_node(self) -> Told | None:
        return self._processes("NPROC_PER_NODE")
