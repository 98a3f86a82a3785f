"""What the ranks of one host have recorded of their collectives, as plain data: processes, places, groups and calls.

    recording = recorded(folder)        # see `recording_files`
    recording.processes[0].calls[-1].seconds

A script may start its ranks by itself. So a rank is a process that has made calls, whoever has started it, and its
number is the one that it has in torch's default group.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autoddp.wire.recorded_calls import WITH_GROUPS, ThreadsTrial

MAKES = "new_group"
"""The method of a place that makes process groups."""
OFTEN = 3
"""Calls of a place that is a part of the steps, at least: what a script does once, at its end for example, is none."""
_KNOWN = {"gloo", "nccl", "undefined"}  # backends by which calls are done again; the last is one of both, by the device


@dataclass(frozen=True, order=True)
class Group:
    """A process group. Groups of the same ranks that the script makes one after another have different names."""

    ranks: tuple[int, ...]
    name: str = ""
    backend: str = ""


@dataclass(frozen=True)
class Place:
    """A line of the script that calls a collective of one group; or of what is no call of a group."""

    file: str
    line: int
    function: str
    collective: str
    """The function of torch.distributed that the script calls."""
    method: str
    """The method of the group to which that leads."""
    part: int
    group: Group | None
    device: str = "cpu"
    dtype: str = ""
    reduction: str = ""
    """See `PlaceNamed`."""
    by: str = ""
    """See `PlaceNamed`."""

    @property
    def where(self) -> str:
        """The file's name and the line, as in `train.py:12`."""
        return f"{os.path.basename(self.file)}:{self.line}"

    @property
    def as_function(self) -> str:
        """The function of torch.distributed that does this, also where the script calls a method of the group."""
        name = self.collective.replace("allreduce", "all_reduce").replace("allgather", "all_gather")
        return name.replace("alltoall", "all_to_all")

    @property
    def is_step(self) -> bool:
        """Whether this is an optimizer's step."""
        return self.method.startswith("step of ")

    @property
    def is_about_groups(self) -> bool:
        """Whether this makes a process group, or destroys it."""
        return self.group is None and self.method in WITH_GROUPS

    @property
    def is_for_objects(self) -> bool:
        """Whether this is a function that pickles objects, as a whole; what it calls has places of its own."""
        return self.group is None and self.method.endswith(("_object", "_object_list"))

    @property
    def repeats_in_steps(self) -> bool:
        """Whether this is a call of a group, or a step of an optimizer."""
        return self.group is not None or self.is_step

    @cached_property
    def of_any_group(self) -> Place:
        """This place, the same for all groups of these ranks: a script may make them anew."""
        return self if self.group is None else replace(self, group=Group(self.group.ranks))


@dataclass(frozen=True, slots=True)
class Call:
    """One call. Times in seconds, by one clock for all processes of a host."""

    place: Place
    number: int
    """It counts the calls of the group in which all ranks take part, or what is done with groups; -1 for others."""
    bytes: int
    began: float
    returned: float
    wait_began: float
    wait_ended: float
    """0 if nothing has waited for its end."""
    is_blocking: bool
    """Whether the script could not go on before the end."""
    cpu_returned: float = 0.0
    """CPU time of the thread when the call has returned; 0 where it is not known. What is no call of a group counts as
    one that returns at once: so it is the CPU time at its begin, and `cpu_waited` that at its end."""
    cpu_waited: float = 0.0
    """CPU time of the thread when the script itself has waited for the end; 0 where it has not, or it is not known."""
    root: int = -1
    """The rank in the group that sends to the others, or collects; -1 where all do the same."""
    at_once: bool = False
    """Whether it is blocking because the script itself waits for it at once: `all_reduce(…, async_op=True).wait()`,
    or the same with a method of the group."""

    @property
    def ended(self) -> float:
        """When the script could go on with the result; where it has not waited, when the call returned."""
        return self.wait_ended or self.returned

    @property
    def seconds(self) -> float:
        """Seconds for which the script stood in the call and in the wait for its end."""
        if self.is_blocking:  # torch waits at once: a core that is lost in between is lost to the call
            return self.ended - self.began
        return self.returned - self.began + self.wait_ended - self.wait_began

    @property
    def back(self) -> float:
        """When the script could go on after the call itself."""
        return self.ended if self.is_blocking else self.returned


@dataclass(frozen=True)
class Sums:
    """All calls of a place together."""

    count: int
    bytes: int
    seconds: float
    """Seconds in the calls and in waits for their ends."""


@dataclass(frozen=True, order=True)
class Use:
    """The first use of what a place's calls have changed, after the script has waited for them."""

    calls: int
    """Calls, and waits for later ends, that lie in between."""
    share: float
    """How much of the gap behind the last of them has passed then: from 0 to 1."""
    where: str
    """ "train.py:12"."""
    scaled: str = ""
    """The line before it that multiplies the result by a number, in place; "" for none."""


@dataclass(frozen=True)
class Look:
    """What the kernel has noted of a process, between the first call and a later one. Seconds."""

    seconds: float = 0.0
    cpu_of_thread: float = 0.0
    """CPU time of the thread that has made the first call."""
    cpu_of_process: float = 0.0
    waited_of_thread: float = 0.0
    """For which that thread could have run and had no core."""
    waited_of_helpers: float = 0.0
    """What all other threads together have waited."""
    pauses: float = 0.0
    """How often that thread has given up its core by itself."""
    began: float = 0.0
    """When the first of the looks was, by the clock of the calls."""


@dataclass(frozen=True)
class Process:
    """A rank."""

    rank: int
    ranks: int
    """Ranks of its world."""
    pid: int
    is_launched: bool
    """Whether autoddp has started it; else the script has."""
    host: str
    cores: int
    threads: int
    began: float
    seconds: float
    """For which it was recorded: from its first call to its last one."""
    look: Look
    calls: Sequence[Call] = field(repr=False)
    """The last ones, in their order."""
    sums: dict[Place, Sums] = field(repr=False)
    interface: str = ""
    """See `WorldNamed`."""
    computes_in_waits: float = 0.0
    """See `WaitsNamed`."""
    waits_in_gaps: float = 0.0
    """Share of the time between its calls for which its thread waits for a core; 0 where that is not known."""
    paused: float = 0.0
    """Seconds for which nothing was recorded: it is the part of a training between whose steps there were pauses."""
    tried: Sequence[Call] = field(default=(), repr=False)
    """Calls during a trial of fewer threads, which are in none of the others."""
    hidden: frozenset[str] = frozenset()
    """See `HiddenNamed`."""
    made: int = 0
    """Calls so far, also those that were not kept."""
    group_events: dict[int, Group] = field(default_factory=dict)
    """The group of each call that makes or destroys one; one of no ranks where this rank does not know it."""
    uses: dict[tuple[Place, int], Use] = field(default_factory=dict)
    """Place and which of its calls in a step (`UsedNamed.nth`) → what was seen of first uses; nothing of a place whose
    results are used where nobody sees it."""
    builds: dict[Place, int] = field(default_factory=dict)
    """Place, of any group → how many calls before is the one from which its calls are given something, see
    `BuildsNamed`."""
    in_threads: bool = False
    """Whether several of its threads call each often, or it stands in several calls at one time, as only they can."""

    @cached_property
    def share_in_calls(self) -> float:
        """Share of its time for which the script stands in calls; a function for objects counts once, as a whole."""
        in_calls = sum(
            one.seconds
            for place, one in self.sums.items()
            if place.is_for_objects or place.is_about_groups or (place.group and "object" not in place.collective)
        )
        return min(1.0, in_calls / self.seconds) if self.seconds else 1.0

    @property
    def calls_groups(self) -> bool:
        """Whether it has called a group."""
        return any(place.group is not None for place in self.sums)

    @property
    def size(self) -> tuple[int, bool]:
        """By which one of two worlds is that of the training."""
        return self.ranks, self.is_launched

    def goes_on_beside(self, other: Process) -> bool:
        """Whether both call groups, at the same time."""
        if not (self.calls_groups and other.calls_groups and self.calls and other.calls):
            return False
        return self.calls[0].began < other.calls[-1].ended and other.calls[0].began < self.calls[-1].ended


@dataclass(frozen=True)
class Recording:
    """What the ranks of one host have recorded."""

    processes: Sequence[Process] = ()
    trial: ThreadsTrial | None = None
    """Turns with fewer threads, if there were any."""

    @property
    def is_there(self) -> bool:
        """Whether a group was called at all."""
        return any(place.group is not None for one in self.processes for place in one.sums)

    @cached_property
    def of_rank(self) -> dict[int, Process]:
        """Each process by its rank; of several worlds one after another, the last.

        Of worlds at one time it is the largest, and of equal ones that of the processes which autoddp has started.
        """
        found: dict[int, Process] = {}
        # What a rank has started beside its training, and what steps there without a group, is not the rank.
        for one in sorted(self.processes, key=lambda one: (one.calls_groups, one.began)):
            before = found.get(one.rank)
            if before is None or not before.goes_on_beside(one) or one.size >= before.size:
                found[one.rank] = one
        return found

    @property
    def beside(self) -> list[Process]:
        """Processes of another world that goes on at the same time as that of the ranks, such as one that generates."""
        others = (one for one in self.processes if one.calls_groups and one is not self.of_rank[one.rank])
        return [one for one in others if one.goes_on_beside(self.of_rank[one.rank])]

    @property
    def longest(self) -> Process:
        """The rank that was recorded for the longest time."""
        return max(self.of_rank.values(), key=lambda one: one.seconds)

    @cached_property
    def groups(self) -> list[Group]:
        """All groups that were called."""
        return sorted({place.group for one in self.processes for place in one.sums if place.group is not None})

    @cached_property
    def seconds(self) -> float:
        """Seconds of the rank that was recorded for the longest time."""
        return max((one.seconds for one in self.processes), default=0.0)

    @property
    def uses_nccl(self) -> bool:
        """Whether NCCL serves calls: those with tensors on a GPU, where the script names no backend, and not gloo."""
        sums = (place for one in self.processes for place in one.sums)
        called = ((place.group.backend, place.device) for place in sums if place.group is not None)
        return any("nccl" in backend or (device == "cuda" and backend != "gloo") for backend, device in called)

    @property
    def other_backends(self) -> list[str]:
        """Backends of its groups by which calls cannot be done again, such as MPI, or one of the script's own."""
        return sorted({g.backend for g in self.groups if g.backend and not _KNOWN & {*re.split("[:,]", g.backend)}})

    @property
    def ranks(self) -> list[int]:
        """The ranks that were recorded."""
        return sorted(self.of_rank)

    @property
    def in_threads(self) -> list[int]:
        """The ranks with calls that cannot be done again one after another: see `Process.in_threads`."""
        return [rank for rank in self.ranks if self.of_rank[rank].in_threads]

    @property
    def world(self) -> int:
        """Ranks of the job, as torch says."""
        return max((one.ranks for one in self.processes), default=0)

    @cached_property
    def often(self) -> set[Place]:
        """The places, of any group, that a rank calls again and again."""
        counts: Counter[Place] = Counter()
        for process in self.of_rank.values():
            of_it: Counter[Place] = Counter()
            for place, sums in process.sums.items():
                of_it[place.of_any_group] += sums.count
            counts |= of_it
        return {place for place, count in counts.items() if count >= OFTEN}

    @cached_property
    def apart(self) -> list[frozenset[int]]:
        """Ranks that meet in their steps, in sets that never do: each set goes on at a pace of its own."""
        # Each place is looked at once: there are hundreds of thousands of calls, and the ranks may need the cores.
        firsts = [
            one for of_it in self.of_rank.values() for one in {id(c.place): c for c in reversed(of_it.calls)}.values()
        ]
        called = [one for one in firsts if one.place.group is not None and one.place.of_any_group in self.often]
        met = [self.of_rank.keys() & group.ranks for group in {one.place.group for one in called if one.place.group}]
        made = [call.began for one in self.processes for call in one.calls if call.place.method == MAKES]
        if called and max(made, default=0.0) > min(one.began for one in called):  # to make a group, all ranks meet
            met.append(set(self.of_rank))
        return [ranks for ranks in joined(met) if ranks]

    @cached_property
    def of_calls(self) -> dict[tuple[Group, int], dict[int, Call]]:
        """Group and number → the call of each of its ranks, of those calls in which all ranks take part."""
        found: dict[tuple[Group, int], dict[int, Call]] = {}
        for rank, one in self.of_rank.items():
            for call in one.calls:
                if call.place.group is not None and call.number >= 0:
                    found.setdefault((call.place.group, call.number), {})[rank] = call
        return found

    @property
    def whole(self) -> dict[tuple[Group, int], dict[int, Call]]:
        """Calls of `of_calls` that have a call of every rank of the group."""
        # A process of an earlier world may have had another number in it: then it is none of the group's ranks here.
        return {key: calls for key, calls in self.of_calls.items() if calls.keys() == set(key[0].ranks)}

    @property
    def missing(self) -> list[int]:
        """Ranks of the world that were not recorded on this host."""
        return [rank for rank in range(self.world) if rank not in self.of_rank]

    @property
    def whole_here(self) -> dict[tuple[Group, int], dict[int, Call]]:
        """Calls of `of_calls` that have a call of every rank of the group that was recorded on this host."""
        if not self.missing:
            return self.whole
        own = self.of_rank.keys()
        return {key: calls for key, calls in self.of_calls.items() if calls.keys() == own & set(key[0].ranks)}


def joined(sets: Iterable[Iterable[int]]) -> list[frozenset[int]]:
    """The sets, with those made one that have a rank in common."""
    found: list[frozenset[int]] = []
    for one in sets:
        together = frozenset(one).union(*(other for other in found if not other.isdisjoint(one)))
        found = [other for other in found if other.isdisjoint(together)] + [together]
    return found
