"""DDP searches for unused parameters in each step, and there are none."""

from __future__ import annotations

import math
from collections.abc import Iterator

from autoddp.diagnose.cause import Cause, Surroundings, Suspicion
from autoddp.diagnose.evidence import Evidence
from autoddp.diagnose.experiments import Condition, Mend
from autoddp.wire import Experiment

_FIX = (
    "DistributedDataParallel(find_unused_parameters=False) if each step uses all parameters; with --static-graph "
    "autoddp tries static_graph=True, which ends the search too"
)


class FindUnusedParameters(Cause):
    in_words = "the search for unused parameters"
    explains = "part"  # without the search DDP also sorts its buckets, so that more of them overlap

    def suspect(self, evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
        if not around.job.find_unused_parameters:  # for any of its models
            return
        everyone = tuple(range(len(evidence.ranks)))
        # DDP walks the whole graph after each forward pass, and never sorts its buckets: how long that takes is not
        # known.
        guess = math.inf
        if around.job.uses_all:
            seen = (
                "DDP looks for unused parameters in each step, and every parameter was used in all steps that were "
                "watched"
            )
            off = Condition(experiment=Experiment(ddp_arguments={"find_unused_parameters": False}))
            yield Suspicion(self.name, everyone, guess, seen, Mend(off), fix=_FIX)


CAUSE = FindUnusedParameters()
