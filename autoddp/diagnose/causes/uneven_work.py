"""Ranks are late by turns, and the size of their batches does not tell why."""

from __future__ import annotations

from collections.abc import Iterator

from autoddp.diagnose.cause import Cause, Surroundings, Suspicion
from autoddp.diagnose.evidence import Evidence
from autoddp.diagnose.experiments import Repeat
from autoddp.diagnose.signs import UNEVEN, share, spread_of_sizes, waiting_by_turns, waits_for_a_core
from autoddp.units import milliseconds

_EVEN = (
    "give the ranks samples that take equally long in the same step: group them by that (a batch sampler), or "
    "limit what one sample may take"
)
_FREE = "find what the ranks share and use by turns: "
_SHARED = "a file lock, a disk, cores (top shows other programs)"


class UnevenWork(Cause):
    in_words = "ranks are late by turns"
    explains = "beside"

    def suspect(self, evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
        waits, everyone = waiting_by_turns(evidence), tuple(range(len(evidence.ranks)))
        if not waits or (spread_of_sizes(evidence) or 0.0) >= UNEVEN:
            return
        seen = f"each rank waits {share(waits, evidence)}, for ranks that are late by turns"
        shared = _SHARED
        if (no_core := waits_for_a_core(evidence)) >= waits:
            seen += f"; on each the training waits {milliseconds(no_core)} ms or more of a step for a core"
            shared = "first of all cores, for which they wait (top shows other programs), then a file lock or a disk"
        proof = Repeat(everyone if evidence.readers == everyone else ())
        yield Suspicion(self.name, everyone, waits, seen, proof, fix=_EVEN, otherwise=_FREE + shared)


CAUSE = UnevenWork()
