"""Batches differ in size, and each step takes as long as the largest of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from autoddp.diagnose.cause import Cause, Surroundings, Suspicion
from autoddp.diagnose.evidence import Evidence
from autoddp.diagnose.experiments import Condition, Mend
from autoddp.diagnose.signs import UNEVEN, computing, spread_of_sizes
from autoddp.units import percent
from autoddp.wire import Experiment

_FIX = (
    "give all ranks batches of similar size in the same step: sort or group samples by length (a batch sampler by "
    "length buckets), or cut and pad them to one length"
)


class UnevenBatches(Cause):
    in_words = "the ranks' batches take different time"

    def suspect(self, evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
        spread = spread_of_sizes(evidence)
        if spread is None or spread < UNEVEN:
            return
        table = computing(evidence)
        means = evidence.means(table)
        own = evidence.own
        more = [statistics.fmean(of_step) - statistics.fmean(means) for of_step in zip(*table, strict=True)]

        def even(r: int, n: int) -> float:
            # As long as the mean over the ranks in this step, beside what r always needs more.
            return own[r][n] - (table[r][n] - means[r]) + more[n]

        everyone = tuple(range(len(table)))
        kept = Condition(experiment=Experiment(kept_batches=evidence.readers))
        seen = (
            f"batches differ in size by {percent(spread)}, and in each step the ranks wait for the one with the largest"
        )
        yield Suspicion(self.name, everyone, evidence.gain(even), seen, Mend(kept, kept, even=True), fix=_FIX)


CAUSE = UnevenBatches()
