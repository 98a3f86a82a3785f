"""The steps of one block as tables of seconds by rank and step, and what follows from them by arithmetic alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from autoddp.timing import STAGES, RankAnatomy, RankSteps, anatomy, median

COMPUTING = ("copy", "forward", "backward", "optimizer")

Table = list[list[float]]
"""Seconds: one list for each rank, with one number for each step."""

_INTERRUPTED = 1.5  # times the usual step: what the script does between two steps makes one with an event that long
_RARE = 0.34  # of the steps: what happens in more of them is no event
_BY_THE_MACHINE = 3.0  # times the usual step
_BY_CHANCE = 0.1  # of the steps
_FEW = 8  # ranks
A_PART = 0.25
"""Share of the seconds of the rank with the longest event, from which another rank counts as at work too."""
_MORE_REGULAR = 0.1  # of an irregularity
_SHORTEST = 0.003  # seconds that an event takes at least: less is noise of the machine
_FEWEST_REGULAR = 4  # events: fewer may come at one distance by chance
_MOST = 0.8  # of events: the machine adds some, and hides some
_LARGER = 1.2  # times the usual elements of a batch


def irregularity(steps: Sequence[int]) -> float:
    """Spread of the distances between steps, as a share of their mean: 0 for every tenth step, about 1 at random."""
    gaps = [after - before for before, after in pairwise(steps)]
    return statistics.pstdev(gaps) / statistics.fmean(gaps) if len(gaps) > 1 else 0.0


def every_nth(steps: Sequence[int], count: int) -> list[int]:
    """Keep the steps that come at one distance in all of `count` steps, if most of them do and they are rare.

    >>> every_nth([3, 13, 20, 23, 33], 40), every_nth([3, 13, 20, 23, 33], 80), every_nth([3, 14, 20, 21, 33], 40)
    ([3, 13, 23, 33], [], [])
    """
    if len(steps) < _FEWEST_REGULAR:
        return []
    distance = statistics.mode(after - before for before, after in pairwise(steps))
    first = statistics.mode(step % distance for step in steps)
    found = [step for step in steps if step % distance == first]
    least = max(_FEWEST_REGULAR, _MOST * (count // distance), _MOST * len(steps))
    return found if least <= len(found) <= _RARE * count else []


@dataclass(frozen=True)
class Evidence:
    """One block of steps with their stages."""

    ranks: Sequence[RankSteps]
    blocks: tuple[Evidence, ...] = ()
    """Blocks of which this one was joined, between which other steps have gone by; empty for a block by itself."""
    _tables: dict[tuple[str, ...], Table] = field(default_factory=dict, repr=False)
    _medians: dict[tuple[str, ...], list[float]] = field(default_factory=dict, repr=False)

    def stage(self, *names: str) -> Table:
        """Seconds of these stages together."""
        if names not in self._tables:
            places = [STAGES.index(name) for name in names]
            self._tables[names] = [[sum(step[place] for place in places) for step in one.stages] for one in self.ranks]
        return self._tables[names]

    @cached_property
    def steps(self) -> list[float]:
        """Seconds of each step: the mean over the ranks, which end a step together where they reduce."""
        return [statistics.fmean(of_step) for of_step in zip(*(one.seconds for one in self.ranks), strict=True)]

    @property
    def count(self) -> int:
        """Number of steps."""
        return len(self.steps)

    @cached_property
    def own(self) -> Table:
        """What each rank needs by itself: without the stages in which ranks wait for each other."""
        together = self.stage("exposed", "buffers")
        return [
            [seconds - shared for seconds, shared in zip(one.seconds, of_rank, strict=True)]
            for one, of_rank in zip(self.ranks, together, strict=True)
        ]

    @cached_property
    def late(self) -> float:
        """Mean seconds for which the last rank of a usual step needs longer by itself than the first one."""
        return self.mean([max(of_step) - min(of_step) for of_step in zip(*self.own, strict=True)])

    @cached_property
    def transfer(self) -> list[float]:
        """Seconds of each step in which gradients travel and nothing is computed."""
        reducing = [
            [max(0.0, seconds - own) for seconds, own in zip(of_rank, one.meeting or (0.0,) * self.count, strict=True)]
            for of_rank, one in zip(self.stage("exposed"), self.ranks, strict=True)
        ]
        return [min(of_step) for of_step in zip(*reducing, strict=True)]

    @cached_property
    def buffers(self) -> list[float]:
        """Seconds in each step for the broadcast of buffers, on the rank that spends least on it."""
        return [min(of_step) for of_step in zip(*self.stage("buffers"), strict=True)]

    @cached_property
    def events(self) -> list[int]:
        """Steps with an event, such as saving: in few steps a rank does far more between two steps than usual."""
        found = []
        for of_rank, one in zip(self.stage("other"), self.ranks, strict=True):
            collecting = one.collecting or (0.0,) * self.count
            # The collector runs in whatever stage makes the object that is one too many.
            scripts = [seconds + collected for seconds, collected in zip(of_rank, collecting, strict=True)]
            limit = median(scripts) + max(_SHORTEST, (_INTERRUPTED - 1) * median(self.steps))
            found += [n for n, seconds in enumerate(scripts) if seconds > limit]
        events = found if len(set(found)) <= _RARE * self.count else []
        return sorted({*events, *(n for of_rank in self.computing_stalls for n, more in enumerate(of_rank) if more)})

    @cached_property
    def computing_stalls(self) -> Table:
        """Seconds that each rank computes longer than the others in every n-th step, as its script makes it; else 0.

        What the machine does comes at random, and what a larger batch does is no event.
        """
        if self.blocks:
            return [[s for block in self.blocks for s in block.computing_stalls[r]] for r in range(len(self.ranks))]
        table, found = self.stage(*COMPUTING), []
        for r, one in enumerate(self.ranks):
            collecting, sizes = one.collecting or (0.0,) * self.count, one.elements or (0,) * self.count
            longer = [table[r][n] - collecting[n] - self.others(COMPUTING, r, n) for n in range(self.count)]
            usual, largest = median(longer), _LARGER * median(sizes)
            limit = usual + max(_SHORTEST, (_INTERRUPTED - 1) * median(self.steps))
            long = [n for n, seconds in enumerate(longer) if seconds > limit and sizes[n] <= largest]
            long.sort(key=longer.__getitem__, reverse=True)  # most of what the machine does is shorter than the events
            events = max((every_nth(sorted(long[:end]), self.count) for end in range(len(long) + 1)), key=len)
            found.append([seconds - usual if n in events else 0.0 for n, seconds in enumerate(longer)])
        return found

    def is_computing(self, steps: Sequence[int]) -> bool:
        """Whether most of what these events take is computing: between two steps a rank does something else."""
        computing = sum(max(of_rank[n] for of_rank in self.computing_stalls) for n in steps)
        return computing > sum(max(self.more_of_the_scripts(n)) for n in steps) / 2

    def more_of_the_scripts(self, step: int) -> list[float]:
        """Seconds of each rank in that step that its script did more than usual: between two steps, or computing."""
        other = self.stage("other")
        usual = self._usual_other
        return [
            other[r][step] - usual[r] + (one.collecting or (0.0,) * self.count)[step] + self.computing_stalls[r][step]
            for r, one in enumerate(self.ranks)
        ]

    def of_the_scripts(self, step: int) -> float:
        """Seconds of an event in that step, on the rank that it takes longest; 0 where there is none."""
        return max(0.0, *self.more_of_the_scripts(step)) if step in self.events else 0.0

    def late_batch(self, step: int) -> float:
        """Seconds that the first batch of an epoch is later than others, on the rank that waits longest for it."""
        if step not in self.epochs:
            return 0.0
        data = self.stage("data")
        return max(0.0, *(of_rank[step] - usual for of_rank, usual in zip(data, self._usual_data, strict=True)))

    @cached_property
    def _usual_data(self) -> list[float]:
        return self.means(self.stage("data"))

    @cached_property
    def _usual_other(self) -> list[float]:
        return self.means(self.stage("other"))

    @cached_property
    def events_of_rank_0(self) -> frozenset[int]:
        """Events that rank 0 alone makes.

        Where ranks do the same by turns, such as waiting for one disk, now rank 0 is the one that takes long, and now
        another one. Then all events together come more regularly than those of rank 0, and none is its own.
        """
        own = []
        for step in self.events:
            first, *others = self.more_of_the_scripts(step)
            longer = self.steps[step] - self.seconds - self.late_batch(step)
            if others and first > longer / 2 and max(others) < A_PART * first:
                own.append(step)
        rest = [step for step in self.events if step not in own]
        by_turns = own and rest and irregularity(self.events) + _MORE_REGULAR < max(map(irregularity, (own, rest)))
        return frozenset() if by_turns else frozenset(own)

    @cached_property
    def _interrupted(self) -> list[int]:
        """Steps that something outside of the script has made far longer: a few, whose batches were not late."""
        seconds = [max(rank[n] for rank in self._without_data) for n in range(self.count)]
        found = [n for n, one in enumerate(seconds) if one > _BY_THE_MACHINE * median(seconds)]
        return found if len(found) <= _BY_CHANCE * self.count else []

    @cached_property
    def _without_data(self) -> Table:
        data = self.stage("data")
        return [[a - b for a, b in zip(own, wait, strict=True)] for own, wait in zip(self.own, data, strict=True)]

    @cached_property
    def epochs(self) -> list[int]:
        """Steps in which some rank has begun a new epoch."""
        return [n for n in range(self.count) if any(one.begun[n] for one in self.ranks if one.begun)]

    @cached_property
    def usual(self) -> list[int]:
        """Steps without an event and without the begin of an epoch; all of them, if there are no others."""
        special = {*self.events, *self.epochs, *self._interrupted}
        return [n for n in range(self.count) if n not in special] or list(range(self.count))

    @cached_property
    def seconds(self) -> float:
        """Mean seconds of a usual step."""
        return self.mean(self.steps)

    def mean(self, values: Sequence[float]) -> float:
        """Mean over the usual steps."""
        return statistics.fmean(values[n] for n in self.usual)

    def means(self, table: Table) -> list[float]:
        """Mean of each rank over the usual steps."""
        return [self.mean(values) for values in table]

    def gain(self, changed: Callable[[int, int], float], steps: Sequence[int] | None = None) -> float:
        """Mean seconds that a step would be shorter if rank r needed `changed(r, n)` seconds by itself in step n.

        Each step waits for its slowest rank, so what a rank does while others are slower costs nothing.
        """
        own, ranks = self.own, range(len(self.ranks))
        chosen = self.usual if steps is None else steps
        return statistics.fmean(max(own[r][n] for r in ranks) - max(changed(r, n) for r in ranks) for n in chosen)

    def gain_as_others(self, rank: int, names: tuple[str, ...]) -> float:
        """Mean seconds that a step would be shorter if these stages took this rank as long as they take the others.

        The others' seconds are those of the next usual step: with those of the same step the two would never wait for
        each other, as equally fast ranks do.
        """
        table, own, usual = self.stage(*names), self.own, self.usual
        following = dict(zip(usual, [*usual[1:], usual[0]], strict=True))

        def changed(r: int, n: int) -> float:
            return own[r][n] - (table[r][n] - self.others(names, r, following[n]) if r == rank else 0.0)

        return self.gain(changed)

    def others(self, names: tuple[str, ...], rank: int, step: int) -> float:
        """The middle of what these stages take the other ranks in that step; of two ranks, what they take the other."""
        table = self.stage(*names)
        if len(table) <= _FEW:
            return median([values[step] for r, values in enumerate(table) if r != rank] or [table[rank][step]])
        if names not in self._medians:  # one rank among many hardly moves the middle
            self._medians[names] = [median(of_step) for of_step in zip(*table, strict=True)]
        return self._medians[names][step]

    @property
    def anatomy(self) -> list[RankAnatomy]:
        """A usual step of each rank."""
        return anatomy(self.ranks, self.usual)

    @property
    def samples(self) -> float | None:
        """Samples of all ranks in a step; None where no loader of torch's gave any."""
        found = [statistics.fmean(one.samples) for one in self.ranks if one.samples]
        return sum(found) if len(found) == len(self.ranks) and all(found) else None

    @cached_property
    def late_data(self) -> Table:
        """Seconds that each rank waits for data. A batch that worker processes have ready is only taken over."""
        return [
            [seconds if _is_late(one, n) else 0.0 for n, seconds in enumerate(of_rank)]
            for of_rank, one in zip(self.stage("data"), self.ranks, strict=True)
        ]

    @cached_property
    def taken_over(self) -> float:
        """Seconds of a usual step for which a rank takes over batches that lay ready, on the rank with the most."""
        data, late = self.means(self.stage("data")), self.means(self.late_data)
        return max(whole - waits for whole, waits in zip(data, late, strict=True))

    @cached_property
    def readers(self) -> tuple[int, ...]:
        """Ranks that read a loader of torch's. How many samples a batch has is not always known."""
        data = self.stage("data")
        return tuple(rank for rank, one in enumerate(self.ranks) if any(one.samples) or any(data[rank]))


def _is_late(of: RankSteps, step: int) -> bool:
    """Whether a batch of that step was not ready, or its loader began anew."""
    return not of.late or of.late[step] > 0 or bool(of.begun and of.begun[step])


def _sums(each: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in each:
        for name, seconds in one.items():
            found[name] = found.get(name, 0.0) + seconds
    return found


def joined(blocks: Sequence[Evidence]) -> Evidence:
    """Several blocks of the same job as one."""
    ranks = []
    for same in zip(*(block.ranks for block in blocks), strict=True):
        first = same[0]
        slowest = min(same, key=lambda one: one.mhz)
        ranks.append(
            RankSteps(
                rank=first.rank,
                host=first.host,
                seconds=tuple(s for one in same for s in one.seconds),
                stages=tuple(s for one in same for s in one.stages),
                samples=tuple(s for one in same for s in one.samples),
                elements=tuple(s for one in same for s in one.elements),
                begun=tuple(s for one in same for s in one.begun),
                collecting=tuple(s for one in same for s in one.collecting),
                meeting=tuple(s for one in same for s in one.meeting),
                late=tuple(s for one in same for s in one.late),
                waited_for_cpu=sum(one.waited_for_cpu for one in same),
                helpers_waited_for_cpu=sum(one.helpers_waited_for_cpu for one in same),
                helpers_ran=sum(one.helpers_ran for one in same),
                page_faults=sum(one.page_faults for one in same),
                in_page_faults=sum(one.in_page_faults for one in same),
                threads=first.threads,
                mhz=slowest.mhz,
                held_back=slowest.held_back,
                prefetched=max(one.prefetched for one in same),
                loader_workers=max(one.loader_workers for one in same),
                indexed=all(one.indexed for one in same),
                persistent=any(one.persistent for one in same),
                queued=tuple(s for one in same for s in one.queued),
                waits=_sums(one.waits for one in same),
            )
        )
    return Evidence(ranks, tuple(blocks))
