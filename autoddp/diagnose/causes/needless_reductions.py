"""Several backward passes make one step, and DDP reduces after each of them."""

from __future__ import annotations

from collections.abc import Iterator

from autoddp.diagnose.cause import Cause, Surroundings, Suspicion
from autoddp.diagnose.evidence import Evidence
from autoddp.diagnose.experiments import Condition, Mend
from autoddp.knobs import Configuration
from autoddp.knobs.micro_batches import DEFER_REDUCTIONS

_FIX = (
    "enter DDP's no_sync() for the forward and backward passes of all micro-batches of a step but the last; a "
    "tuned job does so without a change (defer_reductions)"
)


class NeedlessReductions(Cause):
    in_words = "needless reductions of gradients"
    explains = "part"

    def suspect(self, evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
        # Suspected only where it may be tried, that is where nothing reads the gradients before the last pass.
        passes = round(around.job.micro_batches)
        if DEFER_REDUCTIONS.name not in around.job.knobs or len(evidence.ranks) < 2 or passes < 2:
            return
        seen = (
            f"a step has {passes} backward passes, and DDP reduces the gradients after each of them: once, after the "
            "last one, gives the same"
        )
        once = Condition(Configuration({DEFER_REDUCTIONS.name: passes}))
        guess = evidence.mean(evidence.transfer) * (passes - 1) / passes
        yield Suspicion(self.name, tuple(range(len(evidence.ranks))), guess, seen, Mend(once), fix=_FIX)


CAUSE = NeedlessReductions()
