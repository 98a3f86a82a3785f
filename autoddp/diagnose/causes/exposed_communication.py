"""After the backward pass ranks wait for their gradients."""

from __future__ import annotations

from collections.abc import Iterator

from autoddp.diagnose.cause import Cause, Surroundings, Suspicion
from autoddp.diagnose.evidence import Evidence
from autoddp.diagnose.experiments import Condition, Mend
from autoddp.diagnose.signs import share, waiting_by_turns
from autoddp.units import data_size, milliseconds

_FIX = (
    "tune the job with autoddp: other buckets send gradients earlier, hooks (--allow near or lossy) send fewer "
    "bytes; if the script accumulates gradients, use no_sync()"
)
_FIX_OF_TUNED = (
    "beyond what this run has tried, use a faster network, hooks that send fewer bytes (--allow lossy), or more work "
    "between two reductions (a larger batch: another training)"
)
_OF_LATE_RANKS = (
    "find what makes the ranks late by turns (a file lock, a disk or cores that they share, batches of different "
    "size), because faster communication does not mend that"
)


class ExposedCommunication(Cause):
    in_words = "waiting for gradients"

    def suspect(self, evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
        exposed = evidence.mean(evidence.transfer)
        if len(evidence.ranks) < 2:
            return
        everyone = tuple(range(len(evidence.ranks)))
        size = data_size(around.job.gradient_bytes)
        seen = f"after the backward pass all ranks wait for their {size} of gradients: {share(exposed, evidence)}"
        fix = _FIX_OF_TUNED if around.is_tuned else _FIX
        if waits := waiting_by_turns(evidence):
            fix = "; then ".join([_OF_LATE_RANKS, fix] if waits > exposed else [fix, _OF_LATE_RANKS])
            seen += (
                f"; besides, each rank waits {milliseconds(waits)} ms or more for ranks that are late by turns; steps "
                "without the reduction do not wait for late ranks either, so the price may be more than the gradients "
                "cost"
            )
        yield Suspicion(self.name, everyone, exposed, seen, Mend(Condition(reduce=False)), fix=fix)


CAUSE = ExposedCommunication()
