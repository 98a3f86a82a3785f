"""Causes that are at work in some steps only: how they are suspected, and priced against the steps around them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from autoddp.diagnose.cause import Suspicion
from autoddp.diagnose.evidence import Evidence, irregularity
from autoddp.diagnose.experiments import Events
from autoddp.timing import Difference, difference
from autoddp.units import milliseconds

_FEWEST_EVENTS = 3  # of a kind: fewer give no interval that says anything
_SAME_GAP = 0.8  # of the distances between events, which must be alike for events of every n-th step
_IRREGULAR = 0.6  # spread of the distances between events, as a share of their mean; 1 where they come at random

SAVING = (
    "how long saving takes on your own disk: while a job is diagnosed, what it writes goes to a scratch folder, where "
    "it may be faster"
)
"""What is not measured of a cause that may be saving."""


def suspected_events(
    cause: str,
    ranks: tuple[int, ...],
    evidence: Evidence,
    is_event: Callable[[Evidence, int], bool],
    what: str,
    fix: str,
    others: Callable[[Evidence, int], float] = lambda of, step: 0.0,
) -> Iterator[Suspicion]:
    """The cause, if its steps come at similar distances. `what`: the first words of what was seen.

    `others`: see `Events`.
    """
    events = [n for n in range(evidence.count) if is_event(evidence, n)]
    # What a script does comes at similar distances. What the machine does comes at random.
    if not events or irregularity(events) > _IRREGULAR:
        return
    longer = [evidence.steps[n] - others(evidence, n) - evidence.seconds for n in events]
    seconds = sum(longer) / evidence.count
    each = statistics.fmean(longer)
    seen = f"{what}: {len(events)} of {evidence.count} steps take {milliseconds(each)} ms longer than the others"
    yield Suspicion(cause, ranks, seconds, seen, Events(is_event, others), fix=fix)


def priced_by_events(evidence: Evidence, events: Events) -> Difference | None:
    """What events cost in each step, against the usual steps around each of them; None for too few."""
    usual = set(evidence.usual)
    before, after, found = [], [], []
    for n in range(evidence.count):
        if not events.is_event(evidence, n):
            continue
        found.append(n)
        around = sorted(usual, key=lambda other: abs(other - n))[:4]
        before.append(evidence.steps[n] - events.others(evidence, n))
        after.append(statistics.fmean(evidence.steps[other] for other in around))
    if len(before) < _FEWEST_EVENTS:
        return None
    return difference(before, after).times(_share_of_steps(found, evidence.count))


def _share_of_steps(events: Sequence[int], count: int) -> float:
    """How many of all steps are such events, if these of `count` steps are.

    Of what happens in every n-th step it is 1/n, wherever in a period the record begins and ends.
    """
    gaps = [after - before for before, after in pairwise(events)]
    usual = statistics.mode(gaps)
    return 1 / usual if gaps.count(usual) >= _SAME_GAP * len(gaps) else len(events) / count
