"""The first batch of each epoch is late."""

from __future__ import annotations

from collections.abc import Iterator

from autoddp.diagnose.cause import Cause, Surroundings, Suspicion
from autoddp.diagnose.events import suspected_events
from autoddp.diagnose.evidence import Evidence
from autoddp.diagnose.signs import KEPT_BY_WORKERS

_WITH_WORKERS = f"DataLoader(persistent_workers=True): its workers stay for the next epoch; {KEPT_BY_WORKERS}"
_SELDOM = "what is done once an epoch, such as a scheduler's step, is then done once in that many passes"
_WITHOUT_WORKERS = (
    "do once before training what the sampler and the data set do at the start of each epoch; or make epochs "
    f"longer: let the sampler go through the data several times; {_SELDOM}"
)
_WITH_LASTING_WORKERS = (
    "make epochs longer, because workers load no batch of the next epoch before it begins: let the sampler go "
    f"through the data several times; {_SELDOM}"
)


class EpochStart(Cause):
    in_words = "the start of each epoch"
    in_some_steps = True

    def suspect(self, evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
        everyone = tuple(range(len(evidence.ranks)))

        def is_event(of: Evidence, n: int) -> bool:
            # A script may evaluate where an epoch ends: that has a name of its own.
            longer = of.steps[n] - of.seconds - of.of_the_scripts(n)
            return n in of.epochs and of.late_batch(n) > longer / 2

        what = "a new epoch begins, and its first batch is late"
        if not any(one.loader_workers for one in evidence.ranks):
            fix = _WITHOUT_WORKERS
        else:
            fix = _WITH_LASTING_WORKERS if evidence.ranks[0].persistent else _WITH_WORKERS
        yield from suspected_events(self.name, everyone, evidence, is_event, what, fix, Evidence.of_the_scripts)


CAUSE = EpochStart()
