"""What the anatomy of some steps makes suspicious, each with the experiment that could prove it.

One function for each cause. Each returns what it suspects; its guess says how much a step would gain, by arithmetic.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from autoddp.codec import replace
from autoddp.diagnose.evidence import A_PART, Evidence, Table, irregularity
from autoddp.diagnose.findings import WORTHWHILE
from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.knobs.computing import CUDA_GRAPHS
from autoddp.knobs.ddp_arguments import BUCKET_CAP_MB, GRADIENT_AS_BUCKET_VIEW, SMALLEST_MIB
from autoddp.knobs.micro_batches import DEFER_REDUCTIONS
from autoddp.timing import Difference, difference, median
from autoddp.units import MIB, data_size, milliseconds, percent, ranks_text
from autoddp.wire import AS_IT_IS, ON_DEVICE, PINNED, Delay, Experiment, JobFacts

_DEFAULT_CAP = 25.0  # MiB, of DDP's buckets where the script sets none
_CUT = 8  # parts into which the gradients are cut where one bucket holds them all
_TINY = 1.0  # MiB of gradients: to send fewer, a link needs hardly more than its latency
_SAME_RANK = 0.8  # share of the steps in which one rank must be the slowest to be called the straggler
_UNEVEN = 0.05  # spread of the batches' sizes, as a share of their mean, from which they count as uneven
_NO_CORE = 0.05  # share of a step for which a rank's threads wait for a core, from which there are too many threads
STARVED = 0.5  # share of the rate that is due, below which a link is called slow
_SLOWEST_GBPS = 1.0  # of a network between hosts that train together, where no device says its rate
_ADDED = 0.25  # of a step, which bytes are to cost that an experiment adds
_MOST_ADDED = 64 * MIB
_FEWEST_EVENTS = 3  # of a kind: fewer give no interval that says anything
_SAME_GAP = 0.8  # of the distances between events, which must be alike for events of every n-th step
_SLOW_CLOCK = 0.9  # of the other GPUs' clocks, below which a GPU's clock is why its rank is slow
_LARGER = 1.2  # times the elements of the other ranks' batches, from which a rank has more work
_IRREGULAR = 0.6  # spread of the distances between events, as a share of their mean; 1 where they come at random
_MANY_WORKERS, _MOST_WORKERS = 8, 16  # of one rank's loader: if it has few now, and at all
_QUEUED = 0.1  # of a step's computing, for which the device is behind the script: if it is less, it waits for work
_LINES = 3  # of the script that are named
_COMPUTING = ("copy", "forward", "backward", "optimizer")

Kind = Literal[
    "",
    "clock",
    "cores",
    "batches",
    "memory",
    "some readers",
    "between steps",
    "unseen loading",
    "no workers",
    "workers stay",
    "collector",
    "late by turns",
]
"""What the fix of a cause depends on; "" for the usual one.

- clock: a rank is slow because its GPU's clock is lower than those of the others
- cores: because its threads wait for cores
- batches: because its batches are larger
- memory: because glibc returns more of its memory to the system, and gets it anew in the next step
- some readers: other ranks read their loaders fast
- between steps: a rank is slow in what it does between two steps
- unseen loading: the same, and that may be loading, because the script reads no loader of torch's
- no workers: its loader has none
- workers stay: from one epoch to the next
- collector: Python's garbage collector is the event
- late by turns: every rank waits for the others in some steps, because now one of them is late and now another one
"""


@dataclass(frozen=True)
class Condition:
    """How the job runs in one block: what an experiment compares."""

    configuration: Configuration = AS_WRITTEN
    experiment: Experiment = AS_IT_IS
    reduce: bool = True

    @property
    def without_additions(self) -> Condition:
        """The condition without what is only added to each step, which needs no time to settle."""
        plain = replace(self.experiment, delay=None, added_bytes=0)
        return Condition(self.configuration, plain, self.reduce)

    def with_(self, other: Condition) -> Condition:
        """Both together."""
        mine, theirs = self.experiment, other.experiment
        sizes, memory = mine.sizes or theirs.sizes, theirs.memory or mine.memory
        together = replace(
            mine,
            kept_batches=tuple(sorted({*mine.kept_batches, *theirs.kept_batches})),
            loader_workers=0 if sizes or memory else mine.loader_workers or theirs.loader_workers,
            sizes=sizes,
            memory=memory,
            late_values=mine.late_values or theirs.late_values,
            ddp_arguments={**mine.ddp_arguments, **theirs.ddp_arguments},
            threads=theirs.threads or mine.threads,
        )
        configuration = Configuration({**self.configuration, **other.configuration})
        return Condition(configuration, together, self.reduce and other.reduce)


@dataclass(frozen=True)
class Mend:
    """The cause can be taken away for a block."""

    mended: Condition
    against: Condition = Condition()
    even: bool = False
    """Whether all ranks are also given batches of like size in each step; which sizes is known when they are kept."""


@dataclass(frozen=True)
class Probe:
    """The cause cannot be taken away. A delay in its place shows whether all ranks wait for it."""

    delay: Delay


@dataclass(frozen=True)
class Dose:
    """Bytes are added to what the ranks reduce: what they cost is the rate of the link under this job."""

    bytes: int


@dataclass(frozen=True)
class Repeat:
    """Each rank is given one batch again and again: does the cause stay, or was it in the data?"""

    ranks: tuple[int, ...]
    """All ranks that read batches."""


@dataclass(frozen=True)
class Events:
    """The cause is at work in some steps only: they are compared with their neighbours."""

    is_event: Callable[[Evidence, int], bool]


@dataclass(frozen=True)
class Suspicion:
    """A cause that may be at work."""

    cause: str
    ranks: tuple[int, ...]
    guess: float
    """Seconds that a step might gain."""
    seen: str
    """What was seen, as a sentence without a period."""
    proof: Mend | Probe | Dose | Repeat | Events | None
    why_not: str = ""
    """Why there is no proof for it."""
    fixed: Mend | None = None
    """What the fix itself gives, where `proof` takes the cause away more thoroughly than any fix can."""
    most: str = ""
    """What `proof` does then: "with …"."""
    fix: str = ""
    """What `fixed` does, as a plural: "2 workers"."""
    kind: Kind = ""


@dataclass(frozen=True)
class Surroundings:
    """What is known of the job and its hosts beside its steps."""

    job: JobFacts

    @property
    def due(self) -> tuple[float, str]:
        """Bytes per second that the network should carry, and why as the end of a sentence."""
        if self.job.network_gbps:
            rate = self.job.network_gbps * 1e9 / 8
            return rate, f"the hosts' network devices say that they carry {data_size(int(rate))}/s"
        rate = _SLOWEST_GBPS * 1e9 / 8
        return rate, f"any Ethernet of a machine room carries {data_size(int(rate))}/s"

    @property
    def smaller_cap(self) -> float:
        """MiB of buckets with which most of the gradients travel during the backward pass."""
        return max(SMALLEST_MIB, round(2 * self.gradient_mib / _CUT) / 2)

    def travels(self, size: float) -> float:
        """Bytes that each rank sends and receives to add up `size` bytes over the ranks of DDP's process group."""
        ranks = self.job.ranks_per_group or self.job.world_size
        return 2 * (ranks - 1) / ranks * size

    @property
    def cores_per_rank(self) -> int:
        """CPU cores for each rank; at least one."""
        return max(1, self.job.cores // self.job.ranks_per_host)

    @property
    def gradient_mib(self) -> float:
        """MiB of all gradients, each reduced once."""
        return self.job.gradient_bytes / MIB

    def passes(self, argument: str) -> bool:
        """Whether the script sets this argument of DDP to True."""
        return self.job.ddp_arguments.get(argument) == "True"


def suspicions(evidence: Evidence, around: Surroundings) -> list[Suspicion]:
    """All that is suspected, the largest guess first; nothing below `WORTHWHILE` of a step."""
    found = [one for rule in _RULES for one in rule(evidence, around)]
    least = WORTHWHILE * statistics.fmean(evidence.steps)
    return sorted((one for one in found if one.guess >= least), key=lambda one: -one.guess)


def _share(seconds: float, evidence: Evidence) -> str:
    return f"{milliseconds(seconds)} ms, {percent(seconds / statistics.fmean(evidence.steps))} of a step"


def _data_loader(evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
    data = evidence.stage("data")
    means = evidence.means(data)
    ranks = tuple(r for r, mean in enumerate(means) if mean >= max(WORTHWHILE * evidence.seconds, max(means) / 3))
    if not ranks:
        return
    guess = evidence.gain(lambda r, n: evidence.own[r][n] - (data[r][n] if r in ranks else 0.0))
    alone = "reading for all" if ranks == evidence.readers else "alone"
    who = "every rank waits" if len(ranks) == len(means) else f"{ranks_text(ranks)} {alone} waits"
    seen = f"{who} for the data loader: {_share(max(means), evidence)}"
    # On all ranks, so that all their loaders stay at the same place: an epoch must end on all of them in one step.
    kept = Experiment(kept_batches=evidence.readers)
    # Handing batches over takes time, and loading them takes a core: no worker gives as much as kept batches.
    workers = _more_workers(evidence, max(means), around)
    loaded = Mend(Condition(experiment=replace(kept, loader_workers=workers))) if workers else None
    mended = Mend(Condition(experiment=kept))
    most, fix = "with all batches in memory", f"{workers} workers"
    kind: Kind = "" if ranks == evidence.readers else "some readers"
    yield Suspicion("data_loader", ranks, guess, seen, mended, fixed=loaded, most=most, fix=fix, kind=kind)


def _more_workers(evidence: Evidence, waits: float, around: Surroundings) -> int:
    """How many workers keep up with a rank that waits so long for its data; 0 where none can be had.

    A data set that is a stream is not tried: unless it shares its samples among its workers, each gives all of them.
    """
    if not all(one.indexed for one in evidence.ranks):
        return 0
    present = max(one.loader_workers for one in evidence.ranks)
    most = max(2, min(_MANY_WORKERS, around.cores_per_rank), 2 * present)
    loading = max(1, present) * (evidence.seconds if present else waits)
    needed = math.ceil(loading / max(evidence.seconds - waits, 1e-9)) + 1
    workers = max(2, min(most, needed))
    return workers if present < workers <= _MOST_WORKERS else 0


def _computing(evidence: Evidence) -> Table:
    return evidence.stage(*_COMPUTING)


def _more_computing(evidence: Evidence, rank: int, step: int) -> float:
    """Seconds that this rank computes longer than the others in that step."""
    longer = evidence.stage(*_COMPUTING)[rank][step] - evidence.others(_COMPUTING, rank, step)
    return longer + (max(0.0, _more_between(evidence, rank, step)) if rank else 0.0)


def _all_work_of(evidence: Evidence, rank: int) -> tuple[str, ...]:
    """The stages in which a rank may be slower than the others.

    What it does between two steps counts too, if it is more than the others do. On rank 0 it does not: logging and
    saving are that rank's own.
    """
    more = evidence.mean([_more_between(evidence, rank, n) for n in range(evidence.count)])
    return (*_COMPUTING, "other") if rank and more > 0 else _COMPUTING


def gain_of_slow_rank(evidence: Evidence, suspicion: Suspicion) -> float:
    """Seconds that a usual step would gain if the suspected rank needed no more than the others."""
    (rank,) = suspicion.ranks
    if suspicion.cause == "rank0_work":
        return evidence.gain_as_others(rank, ("other",))
    gain = evidence.gain_as_others(rank, _all_work_of(evidence, rank))
    return gain + _late_gradients(evidence, rank) if suspicion.kind == "cores" else gain


def _late_gradients(evidence: Evidence, rank: int) -> float:
    """Seconds of a step's transfer that pass because this rank's threads that move gradients wait for a core.

    Only where an operator has one thread: else its other threads wait too, while it computes.
    """
    mine, others = evidence.ranks[rank], [one for r, one in enumerate(evidence.ranks) if r != rank]
    if mine.threads > 1:
        return 0.0
    longer = mine.helpers_waited_for_cpu - median([one.helpers_waited_for_cpu for one in others])
    return min(evidence.mean(evidence.transfer), max(0.0, longer / evidence.count))


def _straggler(evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
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
    stage = max(each, key=lambda name: each[name][rank] - median([m for r, m in enumerate(each[name]) if r != rank]))
    usual = median([m for r, m in enumerate(each[stage]) if r != rank])
    host = evidence.ranks[rank].host
    what = "between two steps" if stage == "other" else f"for its {stage}"
    seen = (
        f"rank {rank} on {host} takes {milliseconds(each[stage][rank])} ms {what}, the others {milliseconds(usual)} "
        "ms, and they wait for it"
    )
    longer = evidence.mean([_more_computing(evidence, rank, n) for n in range(evidence.count)])
    kind, why = _why_slow(evidence, rank, longer)
    probe = Probe(Delay(rank, "forward", max(guess, 0.1 * evidence.seconds)))
    if stage == "other" and not kind:
        kind = _kind_of_work(evidence)
    yield Suspicion("straggler", (rank,), guess, seen + why, probe, kind=kind)


def _kind_of_work(evidence: Evidence) -> Kind:
    """The kind of work that some rank does between two steps."""
    return "between steps" if evidence.readers else "unseen loading"


def _why_slow(evidence: Evidence, rank: int, longer: float) -> tuple[Kind, str]:
    """Why a rank computes `longer` seconds than the others in a step, and the end of a sentence that says so."""
    mine, others = evidence.ranks[rank], [one for r, one in enumerate(evidence.ranks) if r != rank]
    clocks = [one.mhz[0] for one in others if one.mhz]
    if mine.mhz and clocks and mine.mhz[0] < _SLOW_CLOCK * (usual := median(clocks)):
        because = f" because {mine.held_back}" if mine.held_back else ""
        why = f"; its GPU runs at {mine.mhz[0]:,} MHz of {mine.mhz[1]:,}{because}, those of the others at {usual:,.0f}"
        return "clock", why
    waits = mine.waited_for_cpu / evidence.count
    usual = median([one.waited_for_cpu for one in others]) / evidence.count
    if waits - usual > longer / 2:
        why = (
            f"; its threads wait {milliseconds(waits)} ms of each step for a core, those of the others "
            f"{milliseconds(usual)} ms: other programs run on its cores"
        )
        return "cores", why
    sizes = [statistics.fmean(one.elements) if one.elements else 0.0 for one in (mine, *others)]
    if (usual := median(sizes[1:])) and sizes[0] > _LARGER * usual:
        return "batches", f"; its batches have {sizes[0] / usual:.2g} times as many numbers as those of the others"
    lost = mine.in_page_faults / evidence.count
    usual = median([one.in_page_faults for one in others]) / evidence.count
    if lost - usual > longer / 2:
        counts = [one.page_faults / evidence.count for one in (mine, *others)]
        why = (
            f"; in each step its process gets {counts[0]:,.0f} pages of memory anew from the system, which take it "
            f"{milliseconds(lost)} ms, those of the others {median(counts[1:]):,.0f} in {milliseconds(usual)} ms"
        )
        return "memory", why
    return "", ""


def _spread_of_sizes(evidence: Evidence) -> float | None:
    """Largest spread of one rank's batch sizes, as a share of their mean; None where no two ranks' sizes are known."""
    sizes = [[one.elements[n] for n in evidence.usual] for one in evidence.ranks if one.elements]
    if len(sizes) < 2 or not all(map(sum, sizes)):
        return None
    return max(statistics.pstdev(of_rank) / statistics.fmean(of_rank) for of_rank in sizes)


def _uneven_batches(evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
    spread = _spread_of_sizes(evidence)
    if spread is None or spread < _UNEVEN:
        return
    table = _computing(evidence)
    means = evidence.means(table)
    own = evidence.own
    more = [statistics.fmean(of_step) - statistics.fmean(means) for of_step in zip(*table, strict=True)]

    def even(
        r: int, n: int
    ) -> float:  # as long as the mean over the ranks in this step, beside what r always needs more
        return own[r][n] - (table[r][n] - means[r]) + more[n]

    everyone = tuple(range(len(table)))
    kept = Condition(experiment=Experiment(kept_batches=evidence.readers))
    seen = f"batches differ in size by {percent(spread)}, and in each step the ranks wait for the one with the largest"
    yield Suspicion("uneven_batches", everyone, evidence.gain(even), seen, Mend(kept, kept, even=True))


def waiting_by_turns(evidence: Evidence) -> float:
    """Seconds of a step for which every rank waits at least for later ranks, if that is much; else 0.

    A rank that is always the last does not wait. So where all wait, they are late by turns: they share a lock, a disk
    or cores, or their batches differ.
    """
    if any(any(one.meeting) for one in evidence.ranks):
        return 0.0  # in collectives of the script's own they wait for each other without the reduction too
    least = min(one.waiting for one in evidence.anatomy)
    return least if least >= WORTHWHILE * evidence.seconds else 0.0


def _uneven_work(evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
    """Ranks are late by turns, and the size of their batches does not tell why."""
    waits, everyone = waiting_by_turns(evidence), tuple(range(len(evidence.ranks)))
    if not waits or (_spread_of_sizes(evidence) or 0.0) >= _UNEVEN:
        return
    seen = f"each rank waits {_share(waits, evidence)}, for ranks that are late by turns"
    if evidence.readers == everyone:
        yield Suspicion("uneven_work", everyone, waits, seen, Repeat(everyone))
    else:
        why = "the script reads no torch DataLoader on every rank, so no batch could be given again and again"
        yield Suspicion("uneven_work", everyone, waits, seen, None, why)


def _communication(evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
    exposed = evidence.mean(evidence.transfer)
    if len(evidence.ranks) < 2:
        return
    everyone = tuple(range(len(evidence.ranks)))
    size = data_size(around.job.gradient_bytes)
    seen = f"after the backward pass all ranks wait for their {size} of gradients: {_share(exposed, evidence)}"
    kind: Kind = ""
    if waits := waiting_by_turns(evidence):
        kind = "late by turns"
        seen += (
            f"; besides, each rank waits {milliseconds(waits)} ms or more for ranks that are late by turns; steps "
            "without the reduction do not wait for late ranks either, so the price may be more than the gradients cost"
        )
    yield Suspicion("exposed_communication", everyone, exposed, seen, Mend(Condition(reduce=False)), kind=kind)
    own = statistics.fmean(max(rank[n] for rank in evidence.own) for n in evidence.usual)
    if around.gradient_mib <= _TINY and exposed > own / 2:
        seen = (
            f"a step computes for {milliseconds(own)} ms and then waits {milliseconds(exposed)} ms for only {size} of "
            "gradients: that is the network's latency, not its rate"
        )
        why = "a larger batch is another training, so it was not tried"
        yield Suspicion("small_batch", everyone, exposed, seen, None, why)
    cap = around.job.ddp_arguments.get(BUCKET_CAP_MB.name)
    present = float(cap) if cap and cap.replace(".", "", 1).isdigit() else _DEFAULT_CAP
    smaller = around.smaller_cap
    if present > 2 * smaller and around.gradient_mib > 2 * smaller and BUCKET_CAP_MB.name in around.job.knobs:
        seen = (
            f"the buckets take up to {present:g} MiB, and all gradients have {around.gradient_mib:.3g} MiB: "
            "most of them begin to travel when the backward pass is over"
        )
        cut = Condition(Configuration({BUCKET_CAP_MB.name: smaller}))
        # Smaller buckets hide at most as much as the backward pass lasts.
        hidden = min(exposed, max(evidence.means(evidence.stage("backward"))))
        yield Suspicion("no_overlap", everyone, hidden, seen, Mend(cut))
    if around.job.nodes > 1:
        due, why = around.due
        # A part may have travelled before, so the link is at most as fast as this.
        rate = around.travels(around.job.gradient_bytes) / max(exposed, 1e-9)
        if rate < due:
            seen = f"gradients travel between the hosts at {data_size(int(rate))}/s, and {why}"
            some = around.job.gradient_bytes * min(1.0, _ADDED * evidence.seconds / max(exposed, 1e-9))
            dose = Dose(int(min(max(some, _TINY * MIB), _MOST_ADDED)))
            yield Suspicion("slow_link", everyone, exposed * (1 - rate / due), seen, dose)


def _needless_reductions(evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
    """Several backward passes make one step, and DDP reduces after each of them.

    Suspected only where it may be tried, that is where nothing reads the gradients before the last pass.
    """
    passes = round(around.job.micro_batches)
    if DEFER_REDUCTIONS.name not in around.job.knobs or len(evidence.ranks) < 2 or passes < 2:
        return
    seen = (
        f"a step has {passes} backward passes, and DDP reduces the gradients after each of them: once, after the last "
        "one, gives the same"
    )
    once = Condition(Configuration({DEFER_REDUCTIONS.name: passes}))
    guess = evidence.mean(evidence.transfer) * (passes - 1) / passes
    yield Suspicion("needless_reductions", tuple(range(len(evidence.ranks))), guess, seen, Mend(once))


def _find_unused_parameters(evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
    if not around.passes("find_unused_parameters"):
        return
    everyone = tuple(range(len(evidence.ranks)))
    # DDP walks the whole graph after each forward pass, and never sorts its buckets: how long that takes is not known.
    guess = evidence.seconds
    if around.job.uses_all:
        seen = (
            "DDP looks for unused parameters in each step, and every parameter was used in all steps that were watched"
        )
        off = Condition(experiment=Experiment(ddp_arguments={"find_unused_parameters": False}))
        yield Suspicion("find_unused_parameters", everyone, guess, seen, Mend(off))


def _buffer_broadcast(evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
    seconds = evidence.mean(evidence.buffers)
    if not around.job.buffer_bytes:
        return
    everyone = tuple(range(len(evidence.ranks)))
    size = data_size(around.job.buffer_bytes)
    seen = f"before each forward pass rank 0 sends {size} of buffers to all ranks: {_share(seconds, evidence)}"
    off = Condition(experiment=Experiment(ddp_arguments={"broadcast_buffers": False}))
    yield Suspicion("buffer_broadcast", everyone, seconds, seen, Mend(off))


def _threads(evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
    share = around.cores_per_rank
    most = max(one.threads for one in evidence.ranks)
    if most * around.job.ranks_per_host <= around.job.cores or most <= share:
        return
    waited = max(one.waited_for_cpu for one in evidence.ranks) / evidence.count
    if waited < _NO_CORE * evidence.seconds:
        return
    seen = (
        f"{around.job.ranks_per_host} ranks with {most} threads each share {around.job.cores} cores: threads wait "
        f"{milliseconds(waited)} ms of each step for a core"
    )
    fewer = Condition(experiment=Experiment(threads=share))
    everyone = tuple(range(len(evidence.ranks)))
    yield Suspicion("threads_oversubscribed", everyone, min(waited, evidence.seconds), seen, Mend(fewer))


def _work_of_rank_0(evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
    """Rank 0 logs, evaluates or saves between two steps: in every step, or in some."""
    if len(evidence.ranks) < 2:
        return
    more = [_more_between(evidence, 0, n) for n in range(evidence.count)]
    usual = evidence.gain_as_others(0, ("other",))

    def is_event(of: Evidence, n: int) -> bool:
        return n in of.events_of_rank_0

    rare = list(_events("rank0_work", (0,), evidence, is_event, "rank 0 does other work between two steps"))
    if rare and rare[0].guess > usual:
        yield from rare
    elif usual >= WORTHWHILE * evidence.seconds and (mean := evidence.mean(more)) > 0:
        seen = f"rank 0 does other work between two steps ({_share(mean, evidence)}), and all others wait for it"
        probe = Probe(Delay(0, "other", max(usual, 0.1 * evidence.seconds)))
        yield Suspicion("rank0_work", (0,), usual, seen, probe, kind=_kind_of_work(evidence))


def _more_between(evidence: Evidence, rank: int, step: int) -> float:
    """Seconds that this rank does something else between two steps, longer than the others in that step."""
    return evidence.stage("other")[rank][step] - evidence.others(("other",), rank, step)


def _epoch_start(evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
    everyone = tuple(range(len(evidence.ranks)))

    def is_event(of: Evidence, n: int) -> bool:
        data = of.stage("data")
        return n in of.epochs and max(rank[n] for rank in data) > (of.steps[n] - of.seconds) / 2

    what = "a new epoch begins, and its first batch is late"
    for found in _events("epoch_start", everyone, evidence, is_event, what):
        if not any(one.loader_workers for one in evidence.ranks):
            yield dataclasses.replace(found, kind="no workers")
        else:
            yield dataclasses.replace(found, kind="workers stay" if evidence.ranks[0].persistent else "")


def _periodic_stall(evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
    def is_event(of: Evidence, n: int) -> bool:
        if n not in of.events or n in of.events_of_rank_0:  # which have a name of their own
            return False
        # What hits the other stages alone is the machine's doing, not the script's.
        return max(of.more_of_the_scripts(n)) > (of.steps[n] - of.seconds) / 2

    what: str = "the script does something else, such as saving or evaluating, in some steps"
    kind: Kind = ""
    events = [n for n in range(evidence.count) if is_event(evidence, n)]
    if events:
        collected = sum(max(one.collecting[n] for one in evidence.ranks) for n in events)
        if collected > sum(evidence.steps[n] - evidence.seconds for n in events) / 2:
            what, kind = "Python's garbage collector runs in some steps", "collector"
    # Where some ranks alone have these steps, the others wait for them.
    each = [evidence.more_of_the_scripts(n) for n in events]
    longest = [sum(of_rank) for of_rank in zip(*each, strict=True)]
    ranks = tuple(r for r, seconds in enumerate(longest) if seconds >= A_PART * max(longest))
    for found in _events("periodic_stall", ranks, evidence, is_event, what):
        yield dataclasses.replace(found, kind=kind)


def _events(
    cause: str,
    ranks: tuple[int, ...],
    evidence: Evidence,
    is_event: Callable[[Evidence, int], bool],
    what: str,
) -> Iterator[Suspicion]:
    events = [n for n in range(evidence.count) if is_event(evidence, n)]
    # What a script does comes at similar distances. What the machine does comes at random.
    if not events or irregularity(events) > _IRREGULAR:
        return
    seconds = sum(evidence.steps[n] - evidence.seconds for n in events) / evidence.count
    each = statistics.fmean(evidence.steps[n] - evidence.seconds for n in events)
    seen = f"{what}: {len(events)} of {evidence.count} steps take {milliseconds(each)} ms longer than the others"
    yield Suspicion(cause, ranks, seconds, seen, Events(is_event))


def _host_device_copy(evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
    copies = evidence.stage("copy")
    guess = evidence.gain(lambda r, n: evidence.own[r][n] - copies[r][n])
    everyone = tuple(range(len(evidence.ranks)))
    seen = f"batches are copied to the device while nothing else runs there: {_share(guess, evidence)}"
    readers = evidence.readers
    if not readers:
        why = "the batches come from no torch DataLoader, so none could be kept"
        yield Suspicion("host_device_copy", everyone, guess, seen, None, why)
        return
    kept = Experiment(kept_batches=readers)
    there, pinned = (Condition(experiment=replace(kept, memory=memory)) for memory in (ON_DEVICE, PINNED))
    as_they_come = Condition(experiment=kept)
    yield Suspicion(
        "host_device_copy",
        everyone,
        guess,
        seen,
        Mend(there, as_they_come),
        fixed=Mend(pinned, as_they_come),
        most="with all batches on the device",
        fix="pinned batches",
    )


def _launch_bound(evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
    if not all(one.queued for one in evidence.ranks):
        return
    computing = max(evidence.means(_computing(evidence)))
    behind = max(evidence.mean(one.queued) for one in evidence.ranks)
    # Where the script waits for values again and again, the queue is empty for that reason.
    if behind + _waited(evidence) > _QUEUED * computing:
        return
    seen = (
        f"the device is never more than {milliseconds(behind)} ms behind the script, of {milliseconds(computing)} ms "
        "that a step computes: it waits for one kernel after another to be launched"
    )
    everyone = tuple(range(len(evidence.ranks)))
    if around.job.cuda_graphs:
        graphs = {GRADIENT_AS_BUCKET_VIEW.name: True, CUDA_GRAPHS.name: around.job.cuda_graphs[0]}
        replayed = Mend(Condition(Configuration(graphs)))
        yield Suspicion("launch_bound", everyone, computing, seen, replayed)
    else:
        reason = around.job.left_out.get(CUDA_GRAPHS.name, "they were not asked for (--cuda-graphs)")
        why = f"CUDA graphs were not tried: {reason}, so how much they would give is not known"
        yield Suspicion("launch_bound", everyone, computing, seen, None, why)


def _waited(evidence: Evidence) -> float:
    """Seconds of a step for which lines of the script wait for the device, on the rank that waits longest."""
    return max(sum(one.waits.values()) for one in evidence.ranks) / evidence.count


def _sync_points(evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
    waited = _waited(evidence)
    if not waited:
        return
    # While the script waits the device works on. What it costs is that the device has nothing to do afterwards, until
    # the script has launched something: at most as long as the script needs for all that it launches.
    guess = min(waited, max(0.0, evidence.seconds - waited))
    lines: dict[str, float] = {}
    for one in evidence.ranks:
        for line, seconds in one.waits.items():
            lines[line] = max(lines.get(line, 0.0), seconds / evidence.count)
    longest = sorted(lines, key=lambda line: -lines[line])
    told = ", ".join(f"{line} ({milliseconds(lines[line])} ms)" for line in longest[:_LINES])
    seen = f"the script waits for the device, on average of all steps at {told}"
    late = Mend(Condition(experiment=Experiment(late_values=True)))
    yield Suspicion("sync_points", tuple(range(len(evidence.ranks))), guess, seen, late)


_RULES = (
    _data_loader,
    _straggler,
    _uneven_batches,
    _uneven_work,
    _communication,
    _needless_reductions,
    _find_unused_parameters,
    _buffer_broadcast,
    _threads,
    _work_of_rank_0,
    _epoch_start,
    _periodic_stall,
    _host_device_copy,
    _launch_bound,
    _sync_points,
)


def priced_by_events(evidence: Evidence, events: Events) -> Difference | None:
    """What events cost in each step, against the usual steps around each of them; None for too few."""
    usual = set(evidence.usual)
    before, after, found = [], [], []
    for n in range(evidence.count):
        if not events.is_event(evidence, n):
            continue
        found.append(n)
        around = sorted(usual, key=lambda other: abs(other - n))[:4]
        before.append(evidence.steps[n])
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
