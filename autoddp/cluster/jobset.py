"""An indexed job of Kubernetes, as JobSet makes it."""

from __future__ import annotations

from autoddp.cluster.base import Platform, Told


class JobSet(Platform):
    """A pod of an indexed job. Its number is told; the other pods may be nodes of one job, or jobs of their own."""

    name = "JobSet, or an indexed job of Kubernetes"

    @property
    def detected(self) -> bool:
        return bool(self._text("KUBERNETES_SERVICE_HOST") and self._text("JOB_COMPLETION_INDEX"))

    @property
    def why(self) -> str:
        return self._seen("JOB_COMPLETION_INDEX")

    @property
    def node_rank(self) -> Told | None:
        return self._node_rank("JOB_COMPLETION_INDEX")
