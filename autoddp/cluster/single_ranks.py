"""Composer, Ray Train, and others that start each rank themselves."""

from __future__ import annotations

from autoddp.cluster.base import Platform


class SingleRanks(Platform):
    """A process that is one rank of somebody else's job: its variables tell a launcher nothing.

    torchrun's own ranks have no NODE_RANK.
    """

    name = "one rank of a job, as Composer and Ray Train start it"

    @property
    def detected(self) -> bool:
        return all(map(self._text, ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")))

    @property
    def why(self) -> str:
        return self._seen("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
