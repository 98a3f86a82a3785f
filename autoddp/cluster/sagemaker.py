"""Amazon SageMaker's training jobs."""

from __future__ import annotations

import json

from autoddp.cluster.base import Platform, Told
from autoddp.errors import UsageError


class SageMaker(Platform):
    """An instance of a SageMaker training job. Its hosts are numbered in the order of their names."""

    name = "SageMaker"
    names_last = True

    @property
    def detected(self) -> bool:
        return bool(self._text("SM_HOSTS") and self._text("SM_CURRENT_HOST"))

    @property
    def why(self) -> str:
        return self._seen("SM_HOSTS", "SM_CURRENT_HOST")

    @property
    def nodes(self) -> Told | None:
        return Told(str(len(self._hosts())), "SM_HOSTS")

    @property
    def node_rank(self) -> Told | None:
        hosts, here = self._hosts(), self._variables["SM_CURRENT_HOST"]
        if here not in hosts:
            raise UsageError(
                f"SM_CURRENT_HOST={here} is not in SM_HOSTS={self._variables['SM_HOSTS']}: correct one of them, or "
                "overrule both by --node-rank"
            )
        return Told(str(hosts.index(here)), "SM_CURRENT_HOST")

    @property
    def processes_per_node(self) -> Told | None:
        return self._processes("SM_NUM_GPUS")

    @property
    def master_address(self) -> Told | None:
        return Told(self._hosts()[0], "SM_HOSTS")

    def _hosts(self) -> list[str]:
        text = self._variables["SM_HOSTS"]
        try:
            hosts = json.loads(text)
        except (ValueError, RecursionError):
            hosts = None
        if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) for host in hosts):
            raise UsageError(
                f"SM_HOSTS={text!r} of {self.name}: must be a list of names in JSON; correct it, or overrule it by "
                "--nnodes, --node-rank and --master-addr"
            )
        return sorted(hosts)
