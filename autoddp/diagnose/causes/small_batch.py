"""So few gradients travel that the network's latency is what ranks wait for."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from autoddp.diagnose.cause import Cause, Surroundings, Suspicion
from autoddp.diagnose.evidence import Evidence
from autoddp.diagnose.signs import TINY_MIB
from autoddp.units import data_size, milliseconds

_FIX = (
    "a larger batch per rank, fewer ranks, or --accumulate-up-to N, with which autoddp reduces once in N steps: each "
    "of them is another training"
)


class SmallBatch(Cause):
    in_words = "small batches"
    explains = "all"

    def suspect(self, evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
        exposed = evidence.mean(evidence.transfer)
        if len(evidence.ranks) < 2:
            return
        everyone = tuple(range(len(evidence.ranks)))
        own = statistics.fmean(max(rank[n] for rank in evidence.own) for n in evidence.usual)
        if around.gradient_mib <= TINY_MIB and exposed > own / 2:
            size = data_size(around.job.gradient_bytes)
            seen = (
                f"a step computes for {milliseconds(own)} ms and then waits {milliseconds(exposed)} ms for only {size} "
                "of gradients: that is the network's latency, not its rate"
            )
            why = "a larger batch is another training, so it was not tried"
            yield Suspicion(self.name, everyone, exposed, seen, None, why, fix=_FIX)


CAUSE = SmallBatch()
