"""Before each forward pass rank 0 sends its buffers to all ranks."""

from __future__ import annotations

from collections.abc import Iterator

from autoddp.diagnose.cause import Cause, Surroundings, Suspicion
from autoddp.diagnose.evidence import Evidence
from autoddp.diagnose.experiments import Condition, Mend
from autoddp.diagnose.signs import share
from autoddp.units import data_size
from autoddp.wire import Experiment

_FIX = (
    "DistributedDataParallel(broadcast_buffers=False): each rank then keeps its own buffers, for BatchNorm its own "
    "running statistics; SyncBatchNorm keeps them equal; where only BatchNorm has buffers, autoddp tries it with "
    "--local-buffers"
)


class BufferBroadcast(Cause):
    in_words = "broadcasts of buffers"
    explains = "beside"

    def suspect(self, evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
        seconds = evidence.mean(evidence.buffers)
        if not around.job.buffer_bytes:
            return
        everyone = tuple(range(len(evidence.ranks)))
        size = data_size(around.job.buffer_bytes)
        seen = f"before each forward pass rank 0 sends {size} of buffers to all ranks: {share(seconds, evidence)}"
        off = Condition(experiment=Experiment(ddp_arguments={"broadcast_buffers": False}))
        yield Suspicion(self.name, everyone, seconds, seen, Mend(off), fix=_FIX)


CAUSE = BufferBroadcast()
