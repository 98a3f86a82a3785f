"""The device waits for one kernel after another to be launched."""

from __future__ import annotations

from collections.abc import Iterator

from autoddp.diagnose.cause import Cause, Surroundings, Suspicion
from autoddp.diagnose.evidence import Evidence
from autoddp.diagnose.experiments import Condition, Mend
from autoddp.diagnose.signs import computing, waited_for_device
from autoddp.knobs import Configuration
from autoddp.knobs.computing import CUDA_GRAPHS
from autoddp.knobs.ddp_arguments import GRADIENT_AS_BUCKET_VIEW
from autoddp.units import milliseconds

_QUEUED = 0.1  # of a step's computing, for which the device is behind the script: if it is less, it waits for work
_FIX = (
    "launch fewer kernels: torch.compile (mode='reduce-overhead' replays them as CUDA graphs), fused=True for the "
    "optimizer, a larger batch (another training); autoddp tries CUDA graphs with --cuda-graphs"
)


class LaunchBound(Cause):
    in_words = "launching kernels"

    def suspect(self, evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
        if not all(one.queued for one in evidence.ranks):
            return
        computes = max(evidence.means(computing(evidence)))
        behind = max(evidence.mean(one.queued) for one in evidence.ranks)
        # Where the script waits for values again and again, the queue is empty for that reason.
        if behind + waited_for_device(evidence) > _QUEUED * computes:
            return
        seen = (
            f"the device is never more than {milliseconds(behind)} ms behind the script, of {milliseconds(computes)} "
            "ms that a step computes: it waits for one kernel after another to be launched"
        )
        everyone = tuple(range(len(evidence.ranks)))
        if around.job.cuda_graphs:
            graphs = {GRADIENT_AS_BUCKET_VIEW.name: True, CUDA_GRAPHS.name: around.job.cuda_graphs[0]}
            replayed = Mend(Condition(Configuration(graphs)))
            yield Suspicion(self.name, everyone, computes, seen, replayed, fix=_FIX)
        else:
            reason = around.job.left_out.get(CUDA_GRAPHS.name, "they were not asked for (--cuda-graphs)")
            why = f"CUDA graphs were not tried: {reason}, so how much they would give is not known"
            yield Suspicion(self.name, everyone, computes, seen, None, why, fix=_FIX)


CAUSE = LaunchBound()
