"""The ranks of a host have more threads than it has cores."""

from __future__ import annotations

from collections.abc import Iterator

from autoddp.diagnose.cause import Cause, Surroundings, Suspicion
from autoddp.diagnose.evidence import Evidence
from autoddp.diagnose.experiments import Condition, Mend
from autoddp.units import milliseconds
from autoddp.wire import Experiment

_NO_CORE = 0.05  # share of a step for which a rank's threads wait for a core, from which there are too many threads


class ThreadsOversubscribed(Cause):
    in_words = "more threads than cores"
    tells_of_cores = True

    def suspect(self, evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
        share = around.cores_per_rank
        most = max(one.threads for one in evidence.ranks)
        if most * around.job.ranks_per_host <= around.job.cores or most <= share:
            return
        waited = max(one.waited_for_cpu for one in evidence.ranks) / evidence.count
        if waited < _NO_CORE * evidence.seconds:
            return
        up_to = "up to " if min(one.threads for one in evidence.ranks) < most else ""
        seen = (
            f"{around.job.ranks_per_host} ranks with {up_to}{most} threads each share {around.job.cores} cores: "
            f"threads wait {milliseconds(waited)} ms of each step for a core"
        )
        fewer = Condition(experiment=Experiment(threads=share))
        everyone = tuple(range(len(evidence.ranks)))
        fix = f"OMP_NUM_THREADS={share}, or torch.set_num_threads({share}) in the script"
        yield Suspicion(self.name, everyone, min(waited, evidence.seconds), seen, Mend(fewer), fix=fix)


CAUSE = ThreadsOversubscribed()
