"""Rank 0 logs, evaluates or saves between two steps: in every step, or in some."""

from __future__ import annotations

from collections.abc import Iterator

from autoddp.diagnose.cause import Cause, Surroundings, Suspicion
from autoddp.diagnose.events import SAVING, suspected_events
from autoddp.diagnose.evidence import Evidence
from autoddp.diagnose.experiments import Probe
from autoddp.diagnose.findings import WORTHWHILE, Finding
from autoddp.diagnose.signs import more_between, or_loading, share
from autoddp.wire import Delay

_FIX = (
    "let rank 0 log, evaluate and save less often, or in a thread of its own that reads a copy of the weights "
    "(asynchronous saving: torch.distributed.checkpoint.async_save)"
)


class Rank0Work(Cause):
    in_words = "work that rank 0 does alone"
    in_some_steps = True

    def suspect(self, evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
        if len(evidence.ranks) < 2:
            return
        more = [more_between(evidence, 0, n) for n in range(evidence.count)]
        usual = evidence.gain_as_others(0, ("other",))

        def is_event(of: Evidence, n: int) -> bool:
            return n in of.events_of_rank_0

        steps = [n for n in range(evidence.count) if is_event(evidence, n)]
        where = "while it computes" if evidence.is_computing(steps) else "between two steps"
        rare = list(
            suspected_events(
                self.name,
                (0,),
                evidence,
                is_event,
                f"rank 0 does other work {where}",
                _FIX,
                Evidence.late_batch,
            )
        )
        if rare and rare[0].guess > usual:
            yield from rare
        elif usual >= WORTHWHILE * evidence.seconds and (mean := evidence.mean(more)) > 0:
            seen = f"rank 0 does other work between two steps ({share(mean, evidence)}), and all others wait for it"
            probe = Probe(
                Delay(0, "other", max(usual, 0.1 * evidence.seconds)), lambda of: of.gain_as_others(0, ("other",))
            )
            yield Suspicion(self.name, (0,), usual, seen, probe, fix=_FIX + or_loading(evidence))

    def not_measured(self, finding: Finding) -> str:
        return SAVING


CAUSE = Rank0Work()
