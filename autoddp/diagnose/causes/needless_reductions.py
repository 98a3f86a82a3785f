"""Several backward passes make one step, and DDP reduces after each of them."""

from __future__ import annotations

from collections.abc import Iterator

from autoddp.diagnose.cause import Cause, Surroundings, Suspicion
from autoddp.diagnose.evidence import Evidence
from autoddp.diagnose.experiments import Condition, Mend
from autoddp.knobs import Configuration
from autoddp.knobs.micro_batches import CHANGES_GRADIENTS, DEFER_REDUCTIONS, FINDS_UNUSED, READS_GRADIENTS

_ENTER = "enter DDP's no_sync() for the forward and backward passes of all micro-batches of a step but the last"
_FIX = f"{_ENTER}; a tuned job does so without a change (defer_reductions)"
_BY_HAND = f"{_ENTER}, unless something reads the gradients before that one's backward pass"
_NOT_TRIED = (CHANGES_GRADIENTS, READS_GRADIENTS, FINDS_UNUSED)
"""Why autoddp leaves no reduction out, though the script could: no gradient is seen to be needed between two passes."""


class NeedlessReductions(Cause):
    in_words = "needless reductions of gradients"
    explains = "part"

    def suspect(self, evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
        job = around.job
        passes, why_not = round(job.micro_batches), ""
        if DEFER_REDUCTIONS.name not in job.knobs:
            why_not = job.left_out.get(DEFER_REDUCTIONS.name, "")
            # Nothing is tried that would refute it, and not each forward pass has a backward pass of its own.
            passes = min(passes, job.backward_passes) if why_not in _NOT_TRIED else 0
        if len(evidence.ranks) < 2 or passes < 2:
            return
        seen = (
            f"a step has {passes} backward passes, and DDP reduces the gradients after each of them: once, after the "
            "last one, gives the same"
        )
        once = None if why_not else Mend(Condition(Configuration({DEFER_REDUCTIONS.name: passes})))
        guess = evidence.mean(evidence.transfer) * (passes - 1) / passes
        everyone = tuple(range(len(evidence.ranks)))
        yield Suspicion(self.name, everyone, guess, seen, once, why_not, _BY_HAND if why_not else _FIX)


CAUSE = NeedlessReductions()
