"""Arithmetic on the steps of one block that several causes need."""

from __future__ import annotations

import statistics

from autoddp.diagnose.evidence import COMPUTING, Evidence, Table
from autoddp.diagnose.findings import WORTHWHILE
from autoddp.units import milliseconds, percent

KEPT_BY_WORKERS = (
    "where the script changes the data set between epochs (its set_epoch, or a length), leave persistent_workers out: "
    "workers that stay do not see that"
)
"""What to look at before workers stay for the next epoch: else every epoch would train what the first one does."""
UNEVEN = 0.05
"""Spread of the batches' sizes, as a share of their mean, from which they count as uneven."""
TINY_MIB = 1.0
"""MiB of gradients: to send fewer, a link needs hardly more than its latency."""


def share(seconds: float, evidence: Evidence) -> str:
    """The seconds, and their share of a step, for a sentence."""
    return f"{milliseconds(seconds)} ms, {percent(seconds / statistics.fmean(evidence.steps))} of a step"


def computing(evidence: Evidence) -> Table:
    """Seconds that each rank computes."""
    return evidence.stage(*COMPUTING)


def more_between(evidence: Evidence, rank: int, step: int) -> float:
    """Seconds that this rank does something else between two steps, longer than the others in that step."""
    return evidence.stage("other")[rank][step] - evidence.others(("other",), rank, step)


def spread_of_sizes(evidence: Evidence) -> float | None:
    """Largest spread of one rank's batch sizes, as a share of their mean; None where no two ranks' sizes are known."""
    sizes = [[one.elements[n] for n in evidence.usual] for one in evidence.ranks if one.elements]
    if len(sizes) < 2 or not all(map(sum, sizes)):
        return None
    return max(statistics.pstdev(of_rank) / statistics.fmean(of_rank) for of_rank in sizes)


def waiting_by_turns(evidence: Evidence) -> float:
    """Seconds of a step for which every rank waits at least for later ranks, if that is much; else 0.

    A rank that is always the last does not wait. So where all wait, they are late by turns: they share a lock, a disk
    or cores, or their batches differ.
    """
    if any(any(one.meeting) for one in evidence.ranks):
        return 0.0  # in collectives of the script's own they wait for each other without the reduction too
    least = min(one.waiting for one in evidence.anatomy)
    return least if least >= WORTHWHILE * evidence.seconds else 0.0


def waits_for_a_core(evidence: Evidence) -> float:
    """Seconds of a step for which the thread that trains could run and has no core, on the rank with the least."""
    return min(one.waited_for_cpu - one.helpers_waited_for_cpu for one in evidence.ranks) / evidence.count


def waited_for_device(evidence: Evidence) -> float:
    """Seconds of a step for which lines of the script wait for the device, on the rank that waits longest."""
    return max(sum(one.waits.values()) for one in evidence.ranks) / evidence.count


def or_loading(evidence: Evidence) -> str:
    """The end of a fix for a rank that is slow between two steps: what it does there may be loading.

    "" where the script reads a loader of torch's, because loading has a stage of its own then.
    """
    return "" if evidence.readers else "; if it loads its data there, make that as fast as it is on the others"
