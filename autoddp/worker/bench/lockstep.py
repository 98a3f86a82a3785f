"""Lets rank 0 tell all ranks what to run next, at the same time, through the job's store and outside of timings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autoddp.worker.process.rank_store import RankStore

Act = Callable[..., "list[float]"]


class Lockstep:
    """Runs functions on all ranks. Only rank 0 decides sizes, repetitions and the end, so all ranks run the same ones.

    if ranks.rank == 0:
        seconds = lockstep.do("reduce", "all", 1024, 10, 5)     # of every rank, [rank][block]
        lockstep.end()
    else:
        lockstep.follow()
    """

    def __init__(self, ranks: RankStore, acts: Mapping[str, Act]) -> None:
        self._ranks = ranks
        self._acts = acts

    def do(self, act: str, *arguments: Any) -> list[list[float]]:
        """On rank 0: run `act` on all ranks; its results by rank. `arguments` are JSON types."""
        self._ranks.share([act, *arguments])
        return self._ranks.gather(self._acts[act](*arguments))

    def follow(self) -> None:
        """On the other ranks: run what rank 0 says until it calls `end`."""
        while order := self._ranks.share(None):
            self._ranks.gather(self._acts[order[0]](*order[1:]))

    def end(self) -> None:
        """On rank 0: make the others return from `follow`."""
        self._ranks.share([])
