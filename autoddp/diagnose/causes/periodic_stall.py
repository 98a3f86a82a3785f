"""The script does something else in some steps, or Python's garbage collector runs in them."""

from __future__ import annotations

from collections.abc import Iterator

from autoddp.diagnose.cause import Cause, Surroundings, Suspicion
from autoddp.diagnose.events import SAVING, suspected_events
from autoddp.diagnose.evidence import A_PART, Evidence
from autoddp.diagnose.findings import Finding
from autoddp.units import ranks_text

_SAVE_LESS = "save and evaluate less often, or save in a thread of its own (torch.distributed.checkpoint.async_save)"
_COLLECT_LESS = (
    "gc.freeze() before training, so that the collector passes over what is there already; gc.collect() less often"
)


class PeriodicStall(Cause):
    in_words = "a stall now and then"
    in_some_steps = True

    def suspect(self, evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
        def is_event(of: Evidence, n: int) -> bool:
            if n not in of.events or n in of.events_of_rank_0:  # which have a name of their own
                return False
            # What hits the other stages alone, and not in every n-th step, is the machine's doing, not the script's.
            return max(of.more_of_the_scripts(n)) > (of.steps[n] - of.seconds - of.late_batch(n)) / 2

        what = "the script does something else, such as saving or evaluating, in some steps"
        fix = _SAVE_LESS
        events = [n for n in range(evidence.count) if is_event(evidence, n)]
        if events:
            collected = sum(max(one.collecting[n] for one in evidence.ranks) for n in events)
            longer = sum(evidence.steps[n] - evidence.seconds - evidence.late_batch(n) for n in events)
            if collected > longer / 2:
                what, fix = "Python's garbage collector runs in some steps", _COLLECT_LESS
        # Where some ranks alone have these steps, the others wait for them.
        each = [evidence.more_of_the_scripts(n) for n in events]
        longest = [sum(of_rank) for of_rank in zip(*each, strict=True)]
        ranks = tuple(r for r, seconds in enumerate(longest) if seconds >= A_PART * max(longest))
        if evidence.is_computing(events):
            who = ranks_text(ranks)
            what = f"computing takes {who} longer than the others in every n-th step"
            fix = (
                f"do less often what {who} does more between the begin of the forward pass and the end of the "
                "optimizer's step, or let all ranks share it"
            )
        yield from suspected_events(self.name, ranks, evidence, is_event, what, fix, Evidence.late_batch)

    def not_measured(self, finding: Finding) -> str:
        return SAVING if finding.fix == _SAVE_LESS else ""


CAUSE = PeriodicStall()
