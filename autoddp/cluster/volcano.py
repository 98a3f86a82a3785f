"""Volcano, whose plugins `svc` and `env` set the variables."""

from __future__ import annotations

import re

from autoddp.cluster.base import Platform, Told

_HOSTS = re.compile("VC_(.+)_HOSTS")


class Volcano(Platform):
    """A pod of a Volcano job. VC_TASK_INDEX counts the pods of one task: with one task it is the node's number."""

    name = "Volcano"

    @property
    def detected(self) -> bool:
        return bool(self._text("VC_TASK_INDEX") and self._tasks())

    @property
    def why(self) -> str:
        return self._seen(*(f"VC_{task}_NUM" for task in self._tasks()), "VC_TASK_INDEX")

    @property
    def nodes(self) -> Told | None:
        task = self._only_task()
        return self._nodes(f"VC_{task}_NUM") if task else None

    @property
    def node_rank(self) -> Told | None:
        return self._node_rank("VC_TASK_INDEX") if self._only_task() else None

    @property
    def master_address(self) -> Told | None:
        told = self._text(f"VC_{self._only_task()}_HOSTS")
        return Told(told.value.split(",")[0].strip(), told.variable) if told else None

    def _tasks(self) -> list[str]:
        return sorted(found[1] for found in map(_HOSTS.fullmatch, self._variables) if found)

    def _only_task(self) -> str:
        """The name of the one task that there is; "" where there are several."""
        return self._tasks()[0] if len(self._tasks()) == 1 else ""
