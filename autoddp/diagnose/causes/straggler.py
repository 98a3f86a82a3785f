"""One rank needs longer than the others in most steps, and they wait for it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autoddp.diagnose.cause import Cause, Surroundings, Suspicion
from autoddp.diagnose.evidence import COMPUTING, Evidence
from autoddp.diagnose.experiments import Probe
from autoddp.diagnose.findings import Finding
from autoddp.diagnose.signs import more_between, or_loading
from autoddp.knobs.env import keeps_memory
from autoddp.timing import RankSteps, median
from autoddp.units import milliseconds
from autoddp.wire import Delay

_SAME_RANK = 0.8  # share of the steps in which one rank must be the slowest to be called the straggler
_SLOW_CLOCK = 0.9  # of the other GPUs' clocks, below which a GPU's clock is why its rank is slow
_LARGER = 1.2  # times the elements of the other ranks' batches, from which a rank has more work


class Straggler(Cause):
    in_words = "one rank is slower than the others"

    def suspect(self, evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
        ranks = range(len(evidence.ranks))
        if len(ranks) < 2:
            return
        slowest = [max(ranks, key=lambda r: _more_computing(evidence, r, n)) for n in evidence.usual]
        rank = statistics.mode(slowest)
        if slowest.count(rank) < _SAME_RANK * len(slowest):
            return
        stages = _all_work_of(evidence, rank)
        guess = evidence.gain_as_others(rank, stages)
        each = {name: evidence.means(evidence.stage(name)) for name in stages}
        stage = max(
            each, key=lambda name: each[name][rank] - median([m for r, m in enumerate(each[name]) if r != rank])
        )
        usual = median([m for r, m in enumerate(each[stage]) if r != rank])
        host, mine = evidence.ranks[rank].host, milliseconds(each[stage][rank])
        what = "between two steps" if stage == "other" else f"for its {stage}"
        seen = (
            f"rank {rank} on {host} takes {mine} ms {what}, the others {milliseconds(usual)} ms, and they wait for it"
        )
        longer = evidence.mean([_more_computing(evidence, rank, n) for n in range(evidence.count)])
        reason = _why_slow(evidence, rank, longer)
        if stage == "other":
            # What it does there waits for a core, or asks for memory, more than what the others do not do.
            no_more = f"let rank {rank} do no more between two steps than the others{or_loading(evidence)}"
            reason = _Reason("", no_more) if reason is None else replace(reason, fix=f"{no_more}; or {reason.fix}")
        elif reason is None:
            reason = _Reason(
                "",
                f"give rank {rank} no more work than the others, and look at its device and host: other processes on "
                "it (nvidia-smi, top), its clock and its cooling",
            )

        def gain(of: Evidence) -> float:
            late = _late_gradients(of, rank) if reason.delays_gradients else 0.0
            return of.gain_as_others(rank, _all_work_of(of, rank)) + late

        probe = Probe(Delay(rank, "forward", max(guess, 0.1 * evidence.seconds)), gain)
        yield Suspicion(self.name, (rank,), guess, seen + reason.seen, probe, fix=reason.fix)

    def not_measured(self, finding: Finding) -> str:
        if finding.status != "proved":
            return ""
        return "the waterfall without the straggler: a slow rank cannot be made faster for an experiment"


CAUSE = Straggler()


@dataclass(frozen=True)
class _Reason:
    """Why a rank is slow."""

    seen: str
    """The reason as the end of a sentence; "" where it is not known."""
    fix: str
    delays_gradients: bool = False
    """Whether the rank's threads that move gradients are late too."""


@dataclass(frozen=True)
class _SlowRank:
    """A rank that computes longer than the others, and what all of them were seen to do."""

    rank: int
    longer: float
    """Seconds of each step."""
    steps: int
    mine: RankSteps
    others: Sequence[RankSteps]

    def in_each_step(self, of: Callable[[RankSteps], float]) -> tuple[float, float]:
        """A sum over all steps as the mean of one: on this rank, and usually on the others."""
        return of(self.mine) / self.steps, median([of(one) for one in self.others]) / self.steps


def _why_slow(evidence: Evidence, rank: int, longer: float) -> _Reason | None:
    """Why a rank computes `longer` seconds than the others in a step; None where nothing shows it."""
    others = [one for number, one in enumerate(evidence.ranks) if number != rank]
    slow = _SlowRank(rank, longer, evidence.count, evidence.ranks[rank], others)
    reasons = (_low_clock, _threads_of_its_own, _more_threads, _other_programs, _larger_batches, _memory_anew)
    return next((found for reason in reasons if (found := reason(slow)) is not None), None)


def _low_clock(slow: _SlowRank) -> _Reason | None:
    mine, clocks = slow.mine, [one.mhz[0] for one in slow.others if one.mhz]
    # A GPU of another model may be at its own highest clock, and nothing keeps it back.
    slowed = mine.mhz and (mine.held_back or mine.mhz[0] < _SLOW_CLOCK * mine.mhz[1])
    if not slowed or not clocks or mine.mhz[0] >= _SLOW_CLOCK * (usual := median(clocks)):
        return None
    because = f" because {mine.held_back}" if mine.held_back else ""
    return _Reason(
        f"; its GPU runs at {mine.mhz[0]:,} MHz of {mine.mhz[1]:,}{because}, those of the others at {usual:,.0f}",
        f"look at the cooling and the power limit of rank {slow.rank}'s GPU "
        "(nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE,POWER)",
    )


def _threads_of_its_own(slow: _SlowRank) -> _Reason | None:
    mine, usual = slow.in_each_step(lambda one: one.helpers_ran)
    # Threads of operators, and the thread that computes gradients of a GPU, work more where the rank has more work.
    if mine - usual <= slow.longer / 2 or slow.mine.threads != 1 or slow.mine.queued:
        return None
    return _Reason(
        f"; threads of its own, beside the one that trains, compute for {milliseconds(mine)} ms of each step, those "
        f"of the others {milliseconds(usual)} ms: they take cores, or Python's lock, from the training",
        f"find what rank {slow.rank} does in threads beside the training, such as watching or logging: do it less "
        "often, or in a process of its own",
    )


def _more_threads(slow: _SlowRank) -> _Reason | None:
    threads, usual = slow.mine.threads, round(median([one.threads for one in slow.others]))
    waited, of_others = slow.in_each_step(lambda one: one.waited_for_cpu)
    if threads <= usual or waited - of_others <= slow.longer / 2:
        return None
    return _Reason(
        f"; its operators use {threads} threads, those of the others {usual}, and its threads wait "
        f"{milliseconds(waited)} ms of each step for a core, those of the others {milliseconds(of_others)} ms",
        f"give rank {slow.rank} as many threads as the others have: torch.set_num_threads({usual}), or one "
        "OMP_NUM_THREADS for all",
    )


def _other_programs(slow: _SlowRank) -> _Reason | None:
    mine, usual = slow.in_each_step(lambda one: one.waited_for_cpu)
    if mine - usual <= slow.longer / 2:
        return None
    return _Reason(
        f"; its threads wait {milliseconds(mine)} ms of each step for a core, those of the others "
        f"{milliseconds(usual)} ms: other programs run on its cores",
        f"keep other programs off the cores of rank {slow.rank} (top shows them), or give the rank cores of its own "
        "(taskset, numactl, the CPUs of its container)",
        delays_gradients=True,
    )


def _larger_batches(slow: _SlowRank) -> _Reason | None:
    mine, *others = (statistics.fmean(one.elements) if one.elements else 0.0 for one in (slow.mine, *slow.others))
    usual = median(others)
    if not usual or mine <= _LARGER * usual:
        return None
    return _Reason(
        f"; its batches have {mine / usual:.2g} times as many numbers as those of the others",
        f"give rank {slow.rank} batches of the size that the others have: share the samples out evenly "
        "(DistributedSampler with drop_last=True), or cut and pad them to one length",
    )


def _memory_anew(slow: _SlowRank) -> _Reason | None:
    mine, usual = slow.in_each_step(lambda one: one.in_page_faults)
    if mine - usual <= slow.longer / 2:
        return None
    pages, usual_pages = slow.in_each_step(lambda one: one.page_faults)
    return _Reason(
        f"; in each step its process gets {pages:,.0f} pages of memory anew from the system, which take it "
        f"{milliseconds(mine)} ms, those of the others {usual_pages:,.0f} in {milliseconds(usual)} ms",
        f"GLIBC_TUNABLES={keeps_memory()}: every rank keeps freed memory for the next step, which may save more "
        "than this; autoddp tries it with 10 trials or more",
    )


def _more_computing(evidence: Evidence, rank: int, step: int) -> float:
    """Seconds that this rank computes longer than the others in that step."""
    longer = evidence.stage(*COMPUTING)[rank][step] - evidence.others(COMPUTING, rank, step)
    return longer + (max(0.0, more_between(evidence, rank, step)) if rank else 0.0)


def _all_work_of(evidence: Evidence, rank: int) -> tuple[str, ...]:
    """The stages in which the rank may be slower than the others.

    They include the time between two steps where the rank does more there than the others. Not on rank 0, which alone
    logs and saves.
    """
    more = evidence.mean([more_between(evidence, rank, n) for n in range(evidence.count)])
    return (*COMPUTING, "other") if rank and more > 0 else COMPUTING


def _late_gradients(evidence: Evidence, rank: int) -> float:
    """Seconds that a step's transfer takes longer because this rank's threads that send gradients wait for a core.

    0.0 where operators use several threads: then those, too, wait for cores, and nobody can tell which ones waited.
    """
    mine, others = evidence.ranks[rank], [one for r, one in enumerate(evidence.ranks) if r != rank]
    if mine.threads > 1:
        return 0.0
    longer = mine.helpers_waited_for_cpu - median([one.helpers_waited_for_cpu for one in others])
    return min(evidence.mean(evidence.transfer), max(0.0, longer / evidence.count))
