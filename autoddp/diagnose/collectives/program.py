"""What the ranks do with their groups in some steps, in a form that processes of autoddp's own can do again.

    script = script_of(recording, steps)         # usual steps of the script
    coalesced = script.changed(merge_small)      # the same with something changed
    script.program, coalesced.program            # for `wire.replayed_calls`

Only calls are taken that all ranks of their group have made in one stretch of time, so nothing waits for a call that is
not there. (Where some ranks are on other hosts, nothing is done again: then those of this host count.) What a rank does
between two calls is a gap: it computes, or it sleeps. A change is made to a whole group: if ranks decided by
themselves, they would no longer ask for the same calls.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autoddp.codec import replace as replace_struct
from autoddp.diagnose.collectives.recording import MAKES, Call, Group, Place, Process, Recording
from autoddp.diagnose.collectives.steps import Steps
from autoddp.diagnose.collectives.stretches import LONGEST_STEP, MOST_CALLS, steps_at, stretches_of
from autoddp.diagnose.collectives.table import leave_together, waits_for
from autoddp.wire.recorded_calls import SHORT_GAP
from autoddp.wire.replayed_calls import CALLS, DESTROY_GROUP, MAKE_GROUP, OBJECTS, REST, WAIT, Act, Program

NO_CALL = (-1, 0)
"""`Played.key` of what is no call of a group."""
_DESTROYS = "destroy_process_group"
_FEWEST_SEEN = 0.3  # of the recording must lie between the looks at the kernel's accounts, to divide gaps by them
_A_CALL = 1e-4  # seconds that a thread computes in a call that returns at once, at most
_UNKNOWN = -1.0
_AS_LONG = 1.5  # times the longest gap between two calls, or a step, may be the gap behind the last call


@dataclass(frozen=True)
class Played:
    """One thing that a rank does, with the call of the script that it stands for."""

    act: Act
    key: tuple[int, int]
    """Group and number: the same on all ranks of the group."""
    call: Call


@dataclass(frozen=True)
class Script:
    """Some steps of all ranks, as written or with a change."""

    groups: tuple[Group, ...]
    played: dict[int, tuple[Played, ...]]
    """What each rank does."""
    covers: float
    """How many steps that is."""
    seconds: float
    """Seconds that all this took in the script, on the slowest rank; where `of_each`, on average."""
    ranks: int
    pauses: dict[int, float] = field(default_factory=dict)
    """Seconds that each rank usually sleeps at a time, see `Program.pauses`."""
    builds: dict[Place, int] = field(default_factory=dict)
    """See `Process.builds`, of all ranks."""
    of_each: bool = False
    """See `Steps.of_each`."""
    pace: float = 1.0
    """See `Stretch.pace`."""
    stepped: dict[int, list[float]] = field(default_factory=dict)
    """When the optimizer that steps most often has stepped, on each rank."""

    @property
    def program(self) -> Program:
        """For the replay. A rank of the world that has made none of the calls does nothing."""
        acts = tuple(tuple(_acts(self.played.get(rank, ()))) for rank in range(self.ranks))
        used = {act.group for of_rank in acts for act in of_rank}
        groups = tuple(group.ranks if n in used else () for n, group in enumerate(self.groups))
        pauses = tuple(self.pauses.get(rank, 0.0) for rank in range(self.ranks))
        return Program(groups, acts, pauses, self.of_each, tuple(group.backend for group in self.groups))

    def changed(self, change: Callable[[Sequence[Played]], Iterable[Played]]) -> Script:
        """This script with each rank's part changed."""
        return replace(self, played={rank: tuple(change(of_rank)) for rank, of_rank in self.played.items()})

    @cached_property
    def of_key(self) -> dict[tuple[int, int], dict[int, Played]]:
        """Group and number → what each rank of the group does."""
        found: dict[tuple[int, int], dict[int, Played]] = {}
        for rank, of_rank in self.played.items():
            for one in of_rank:
                if one.key != NO_CALL:
                    found.setdefault(one.key, {})[rank] = one
        return found

    def agreed(self, holds: Callable[[Played], bool]) -> set[tuple[int, int]]:
        """The calls for which something holds on every rank of the group."""
        return {key for key, of_ranks in self.of_key.items() if all(holds(one) for one in of_ranks.values())}

    @cached_property
    def follows_at_once(self) -> set[tuple[int, int]]:
        """The calls that come right after the call of their group before them, with little between.

        A process that loses its core has a long gap there, and the others of its group have none. So it counts if the
        gap is short on one rank: between two steps it is long on all of them. It is compared with what calls of a place
        usually take: a single one may be quick by chance, and Python's work between two calls is slow where cores are
        short. Nor does a call follow one of an earlier step, however long calls take: the optimizer needs that first.
        """
        follows: dict[tuple[int, int], bool] = {}
        soon: set[tuple[int, int]] = set()
        for rank, of_rank in self.played.items():
            before: Played | None = None
            stepped, steps_before = self.stepped.get(rank, []), 0
            for one in of_rank:
                group, number = one.key
                steps = bisect_right(stepped, one.call.began)
                adjacent = before is not None and before.key == (group, number - 1) and steps == steps_before
                alike = before is not None and before.act.call == one.act.call and before.act.waits == one.act.waits
                follows[one.key] = follows.get(one.key, True) and adjacent and alike
                little = (
                    _LITTLE if before is None else max(_LITTLE, _SHARE * self._usual_seconds[rank, before.call.place])
                )
                if before is not None and one.act.computes + one.act.sleeps <= little:
                    soon.add(one.key)
                before, steps_before = one, steps
        return {key for key, holds in follows.items() if holds and key in soon}

    @cached_property
    def _usual_seconds(self) -> dict[tuple[int, Place], float]:
        """Rank and place → the median seconds of its calls, but not for what ranks wait that come earlier than another.

        Where one rank loads data, the others stand in a call for as long as that takes, and a gap of theirs is short
        beside it. Where all leave a call together, the rank that is usually late waits for nobody.
        """
        waits = {
            (key, rank): seconds
            for key, of_ranks in self.of_key.items()
            if (waited := waits_for({rank: one.call for rank, one in of_ranks.items()})) is not None
            for rank, seconds in waited[1].items()
            if not leave_together(of_ranks[rank].call.place.method)
        }
        of_ranks: dict[tuple[int, Place], list[float]] = {}
        for rank, of_rank in self.played.items():
            for one in of_rank:
                seconds = one.call.seconds - waits.get((one.key, rank), 0.0)
                of_ranks.setdefault((rank, one.call.place), []).append(seconds)
        usual = {of_it: statistics.median(seconds) for of_it, seconds in of_ranks.items()}
        least: dict[Place, float] = {}
        for (_, place), seconds in usual.items():
            least[place] = min(seconds, least.get(place, seconds))
        return {
            (rank, place): least[place] if leave_together(place.method) else seconds
            for (rank, place), seconds in usual.items()
        }

    @cached_property
    def least_gap(self) -> dict[tuple[int, int], float]:
        """Call → what is computed before it in any case, over all calls of its line with as many bytes, on any rank.

        Behind a wait the same lines take several times as long, because others have used the core meanwhile. Without
        the wait they do not. So it is less than nine of ten of these calls have before them.
        """
        of_alike: dict[tuple[Place, int], list[float]] = {}
        for of_ranks in self.of_key.values():
            for one in of_ranks.values():
                of_alike.setdefault((one.call.place.of_any_group, one.act.bytes), []).append(one.act.computes)
        least = {alike: sorted(of_it)[len(of_it) // 10] for alike, of_it in of_alike.items()}
        return {
            key: min(least[one.call.place.of_any_group, one.act.bytes] for one in of_ranks.values())
            for key, of_ranks in self.of_key.items()
        }


def _acts(played: Sequence[Played]) -> Iterator[Act]:
    """What a rank does, each wait for the call that it is for: a script that keeps handles has several calls open."""
    started: dict[int, int] = {}
    for number, one in enumerate(played):
        if one.act.call == WAIT and id(one.call) in started:
            yield with_(one.act, after=number - started.pop(id(one.call)))
            continue
        if one.key != NO_CALL and not one.act.waits:
            started[id(one.call)] = number
        yield one.act


_LITTLE = 3e-5  # seconds between two calls, from which something is computed between them
_SHARE = 0.5  # of a call, likewise


def script_of(recording: Recording, steps: Steps) -> Script | None:
    """Usual steps of the script that can be done again; None if there are none."""
    whole = {
        key: calls
        for key, calls in recording.whole_here.items()
        if all(can_be_done(call.place) for call in calls.values())
        and all(call.place.of_any_group in recording.often for call in calls.values())
    }
    each = (call for calls in whole.values() for call in calls.values())
    if not whole or are_before_the_steps(each, recording, steps):
        return None
    called = sorted({group for group, _ in whole})
    stretches = stretches_of(recording, steps, whole)
    place = {group: number for number, group in enumerate(called)}
    taken: _Taken = {rank: [] for rank in recording.of_rank}
    for (group, number), calls in whole.items():
        if stretches[min(calls)].has(calls):
            # Ranks may give more or less, as in an all-to-all of experts. It takes as long as the most of it; and what
            # is done again has pieces of one size, which must be the same on all ranks.
            most = max(call.bytes for call in calls.values())
            for rank, call in calls.items():
                taken[rank].append((call.began, (place[group], number), replace(call, bytes=most)))
    longest = stretches.get(recording.longest.rank)
    count = 0.0 if longest is None else longest.steps
    if max(map(len, taken.values())) > MOST_CALLS:
        taken, count = _shorter(taken), 0.0
    taken = _with_whole_objects(taken)
    if not any(taken.values()):
        return None
    # Groups that are made meanwhile: one after another takes the place of those that have the same ranks.
    begin = min(began for of_rank in taken.values() for began, _, _ in of_rank)
    made = _made(recording, begin, max(stretch.end for stretch in stretches.values()))
    slots = sorted({Group(group.ranks) for group in made.groups})
    backends = {group.ranks: group.backend for group in called}
    groups = (*called, *(replace(slot, backend=backends.get(slot.ranks, "")) for slot in slots))
    slot_of = {group.name: len(called) + slots.index(Group(group.ranks)) for group in made.groups}
    acts_in = [slot_of.get(group.name, number) for number, group in enumerate(called)]
    usual = steps.seconds if steps.unit != "second" else 0.0
    done = {
        rank: _played(recording.of_rank[rank], sorted(of_rank), acts_in, made.acts(rank, slot_of), usual)
        for rank, of_rank in taken.items()
        if of_rank or made.calls.get(rank)
    }
    played = {rank: of_rank for rank, (of_rank, _) in done.items()}
    spans = {rank: _until(of_rank[-1]) - of_rank[0].call.began for rank, (of_rank, _) in done.items()}
    lasts = {rank: spans[rank] - cut for rank, (_, cut) in done.items()}
    seconds = max(lasts.values())
    covers = count or (max(spans.values()) / steps.seconds if steps.seconds > 0 else 1.0)
    pace = 1.0 if longest is None or not count else longest.pace
    if count and len(set(stretches.values())) > 1:  # the time that one of them happened to get tells little
        seconds, pace = covers * steps.seconds, 1.0
    of_each = bool(count) and steps.of_each
    pauses = {rank: _pause(recording.of_rank[rank], of_rank, lasts[rank]) for rank, of_rank in played.items()}
    builds: dict[Place, int] = {}
    for one in recording.of_rank.values():
        builds |= one.builds
    ranks = max(recording.world, max(played) + 1)
    stepped = {rank: _stepped(recording.of_rank[rank]) for rank in played}
    return Script(groups, played, covers, seconds, ranks, pauses, builds, of_each, pace, stepped)


def _stepped(process: Process) -> list[float]:
    place = steps_at(process)
    return sorted(call.began for call in process.calls if call.place == place)


def are_before_the_steps(calls: Iterable[Call], recording: Recording, steps: Steps) -> bool:
    """Whether none of these calls lies between two steps of an optimizer: then they set up what the steps train.

    A step takes none of their time, whatever they cost. Where the calls themselves tell the steps, this is not known.
    """
    if steps.period or steps.unit != "step":
        return False
    ends = [call.began for process in recording.of_rank.values() for call in process.calls if call.place.is_step]
    first, last = min(ends), max(ends)
    return not any(first < call.ended and call.began < last for call in calls)


def _until(last: Played) -> float:
    """When that is over; `rest` has the call behind it."""
    return last.call.began if last.act.call == REST else last.call.ended


def can_be_done(place: Place) -> bool:
    """Whether calls of this place can be done again; those from one rank to another cannot."""
    return place.collective in OBJECTS if "object" in place.collective else place.method in CALLS


_Taken = dict[int, list[tuple[float, tuple[int, int], Call]]]


@dataclass(frozen=True)
class _Made:
    """What the ranks do with groups in a stretch of time, if all of them make the same ones there."""

    groups: tuple[Group, ...] = ()
    """The groups that are made, in their order."""
    calls: dict[int, list[tuple[Call, str]]] = field(default_factory=dict)
    """Each rank's calls that make or destroy one of these, with its name."""

    def acts(self, rank: int, slot_of: dict[str, int]) -> list[tuple[Call, Act]]:
        """The calls of a rank with what is done in place of them."""
        acts: list[tuple[Call, Act]] = []
        made: dict[int, list[str]] = {}  # slot → the groups that were made in it, the last one first
        for call, name in sorted(self.calls.get(rank, ()), key=lambda one: one[0].began):
            slot = slot_of[name]
            names = made.setdefault(slot, [])
            if call.place.method == MAKES:
                names.insert(0, name)
                acts.append((call, Act(MAKE_GROUP, slot)))
            else:
                acts.append((call, Act(DESTROY_GROUP, slot, made_since=names.index(name))))
        return acts


def _made(recording: Recording, begin: float, end: float) -> _Made:
    """The groups that every rank makes between these times. `new_group` is called by all ranks, in the same order."""
    every = {
        rank: [call for call in one.calls if call.place.method == MAKES and call.place.is_about_groups]
        for rank, one in recording.of_rank.items()
    }
    if len(every) < recording.world:
        return _Made()
    groups: list[Group] = []
    calls: dict[int, list[tuple[Call, str]]] = {rank: [] for rank in every}
    for together in zip(*every.values(), strict=False):  # the script may be ended where one rank has made one more
        if min(call.began for call in together) < begin or max(call.ended for call in together) > end:
            continue
        told = [recording.of_rank[rank].group_events for rank in every]
        known = {of_it[one.number] for of_it, one in zip(told, together, strict=True) if one.number in of_it}
        known.discard(Group(()))  # of a rank that is none of its ranks
        if len(known) != 1:  # made on some ranks only, by another way than all the others
            return _Made()
        (group,) = known
        groups.append(group)
        for rank, call in zip(every, together, strict=True):
            calls[rank].append((call, group.name))
    names = {group.name for group in groups}
    for rank, one in recording.of_rank.items():
        for call in one.calls:
            name = getattr(one.group_events.get(call.number), "name", "")
            if call.place.method == _DESTROYS and call.place.is_about_groups and name in names and call.ended <= end:
                calls[rank].append((call, name))
    return _Made(tuple(groups), calls)


def _shorter(taken: _Taken) -> _Taken:
    """The last `MOST_CALLS` of the rank that has the most, and of all others those of the same numbers or later."""
    busiest = max(taken, key=lambda rank: len(taken[rank]))
    begin = sorted(taken[busiest])[-MOST_CALLS][0]
    dropped = {key for of_rank in taken.values() for began, key, _ in of_rank if began < begin}
    return {rank: [one for one in of_rank if one[1] not in dropped] for rank, of_rank in taken.items()}


def _with_whole_objects(taken: _Taken) -> _Taken:
    """Without the later calls of functions for objects whose first call is not taken, as behind a trial of threads.

    Else they would count as calls of their own, or as parts of another one, not the same on all ranks.
    """
    kept: set[tuple[int, int]] = set()
    places = {key: call.place for of_rank in taken.values() for _, key, call in of_rank}
    for group, number in sorted(places):
        place = places[group, number]
        if not (place.part and "object" in place.collective) or (group, number - 1) in kept:
            kept.add((group, number))
    return {rank: [one for one in of_rank if one[1] in kept] for rank, of_rank in taken.items()}


def _played(
    process: Process,
    taken: Sequence[tuple[float, tuple[int, int], Call]],
    acts_in: Sequence[int],
    with_groups: Sequence[tuple[Call, Act]],
    usual: float,
) -> tuple[tuple[Played, ...], float]:
    """A rank's calls with the gaps before them, and seconds of the last gap that are not done again.

    A function for objects, which makes several calls, is one call. `acts_in`: group as in `Played.key` → the group in
    which the call is done again. `usual`: seconds of a step; 0 where there are none.
    """
    events: list[tuple[float, tuple[int, int], Call, Act | None]] = [(*one, None) for one in taken]
    events += [
        (call.wait_began, NO_CALL, call, Act(WAIT)) for _, _, call in taken if call.wait_ended and not call.is_blocking
    ]
    events += [(call.began, NO_CALL, call, act) for call, act in with_groups]
    events.sort(key=lambda one: one[0])
    pickling = [call for call in process.calls if call.place.is_for_objects]
    starts = [call.began for call in pickling]
    found: list[Played] = []
    rank = _Rank(_of_gaps(process), events[0][0])
    for began, key, call, no_call in events:
        objects = "object" in call.place.collective
        whole = pickling[bisect_right(starts, began) - 1] if starts and objects else None
        if whole is not None and not whole.began <= began <= whole.ended:
            whole = None
        # When a group takes the place of another one, the other one is destroyed then, which the replay does by itself.
        is_made = bool(found) and found[-1].act.call == MAKE_GROUP
        free_until = rank.back if is_made else began if whole is None else whole.began
        computes, sleeps = rank.gap_before(call, free_until, no_call)
        rank.does(call, whole, starts_only=no_call is None and not call.is_blocking)
        if no_call is not None:
            found.append(Played(with_(no_call, computes=computes, sleeps=sleeps), key, call))
            continue
        if objects and call.place.part and found and found[-1].call.place.line == call.place.line:
            # The sizes may come last, as those of `scatter_object_list`.
            found[-1] = replace(found[-1], act=with_(found[-1].act, bytes=max(found[-1].act.bytes, call.bytes)))
            continue
        act = Act(
            call=call.place.collective if objects else call.place.method,
            group=acts_in[key[0]],
            bytes=call.bytes,
            computes=computes,
            sleeps=sleeps,
            waits=call.is_blocking,
            root=call.root,
            dtype=call.place.dtype,
            device=call.place.device,
        )
        found.append(Played(act, key, call if whole is None else _as_a_whole(call, whole)))
    # As many gaps as calls: what a change lets run beside the gap behind the last call has to have that gap. But no
    # pause that comes once: one that comes again and again lies before the first call, too.
    later = [call for call in process.calls if call.began >= rank.back and _ends_a_gap(call.place)]
    behind = min(later, key=lambda call: call.began, default=None)
    is_made = found[-1].act.call == MAKE_GROUP
    longest = max(rank.longest_gap, usual, _gap_ahead(process, events[0][0]))
    cut = 0.0
    if behind is not None and not is_made and (gap := behind.began - rank.back) <= _AS_LONG * longest:
        computes, sleeps = rank.gap_before(behind, behind.began, None)
        # No call needs more of it to be hidden there, and a replay should not take minutes.
        share = min(1.0, LONGEST_STEP / max(gap, 1e-9))
        made = [*rest(computes * share, sleeps * share, replace(found[-1], call=behind))]
        found += made
        cut = gap * (1.0 - share) if made else 0.0
    return tuple(_without_waits(found, _idle(process, found))), cut


def _without_waits(found: Sequence[Played], idle: float) -> Iterator[Played]:
    """Take out of a rank's gaps what it has waited for a core in them; of its sleeps the share `idle` was none of that.

    A gap in which the rank waited is longer than the other gaps before the same line. So the longest gaps are cut, all
    to the same length. If each gap were cut by the same share, some would stay longer than others; but in the replay
    the ranks wait for cores too, so these waits would count twice.
    """
    sleeps: dict[tuple[Place, str], list[float]] = {}
    for one in found:
        sleeps.setdefault((one.call.place.of_any_group, one.act.call), []).append(one.act.sleeps)
    longest = {where: _cut_at(of_it, idle * sum(of_it)) for where, of_it in sleeps.items()}
    for one in found:
        most = longest[one.call.place.of_any_group, one.act.call]
        yield replace(one, act=with_(one.act, sleeps=most)) if one.act.sleeps > most else one


def _cut_at(lengths: Sequence[float], left: float) -> float:
    """The length to which all longer ones have to be cut, so that their sum becomes `left`."""
    for number, length in enumerate(sorted(lengths)):
        if (share := left / (len(lengths) - number)) <= length:
            return share
        left -= length
    return max(lengths)


def _gap_ahead(process: Process, began: float) -> float:
    """Seconds between what is called then and the call before it; 0 for the first call."""
    before = (call.back for call in process.calls if call.back <= began and _ends_a_gap(call.place))
    return began - max(before, default=began)


def _as_a_whole(part: Call, whole: Call) -> Call:
    """The first call of a function for objects, for as long as all of the function takes: it pickles, too."""
    return replace(part, began=whole.began, returned=whole.ended, wait_began=whole.ended, wait_ended=whole.ended)


def _ends_a_gap(place: Place) -> bool:
    """Whether a gap of what is done again ends with it: sends lie within one, wherever in a step they are."""
    is_done = place.group is not None and can_be_done(place)
    return is_done or place.is_about_groups or place.is_for_objects


def rest(computes: float, sleeps: float, last: Played) -> Iterator[Played]:
    """A gap behind which nothing is called any more, if there is one: it is done all the same."""
    if computes or sleeps:
        yield Played(Act(REST, last.act.group, computes=computes, sleeps=sleeps), NO_CALL, last.call)


def with_(act: Act, **changes: object) -> Act:
    """The act with some of its fields changed."""
    return replace_struct(act, **changes)


@dataclass(frozen=True)
class _Gaps:
    """What a rank does between its calls."""

    computes: float
    """Share of all gaps for which it computes: for those of which it is not known."""
    in_waits: float
    """See `Process.computes_in_waits`."""

    def divided(self, gap: float, cpu: float) -> tuple[float, float]:
        """Seconds for which it computes in a gap, and for which it does not. `cpu`: its CPU time there; -1: unknown."""
        if cpu == _UNKNOWN:
            cpu = gap if gap <= SHORT_GAP else gap * self.computes
        computes = min(gap, max(0.0, cpu))
        return computes, gap - computes

    @staticmethod
    def cpu_returned(call: Call, before: float) -> float:
        """The thread's CPU time when a call has returned; 0 where it is not known. `before`: when the call began."""
        return call.cpu_returned or (before + call.returned - call.began if before else 0.0)

    def cpu_behind(self, call: Call, before: float) -> float:
        """The thread's CPU time when it has waited for the end of a call; 0 where it is not known."""
        if call.cpu_waited or not (returned := self.cpu_returned(call, before)):
            return call.cpu_waited
        return returned + self.in_waits * (call.wait_ended - call.wait_began)

    def cpu_before(self, call: Call, began: float, is_wait: bool) -> float:
        """The thread's CPU time when a call, or the wait for its end, began; 0 where it is not known."""
        if is_wait:
            return max(0.0, call.cpu_waited - self.in_waits * (call.wait_ended - call.wait_began))
        if not call.cpu_returned:
            return 0.0
        # Before its calls a function for objects pickles. A call that takes long until it returns waits in there.
        return max(0.0, call.cpu_returned - (call.began - began) - min(call.returned - call.began, _A_CALL))


@dataclass
class _Rank:
    """A rank on its way through its calls."""

    gaps: _Gaps
    back: float
    """Until when it was busy with a call."""
    cpu: float = 0.0
    """CPU time of its thread then; 0 where that is not known."""
    longest_gap: float = 0.0
    _cpu_at_call: float = 0.0
    """The CPU time when the call behind the gap began; 0 where that is not known."""

    def gap_before(self, call: Call, began: float, act: Act | None) -> tuple[float, float]:
        """Seconds for which it computes, and for which it sleeps or waits for a core, until `began`.

        `act`: what begins then, if it is not the call itself: the wait for its end, or something with groups.
        """
        gap = max(0.0, began - self.back)
        self.longest_gap = max(self.longest_gap, gap)
        is_wait = act is not None and act.call == WAIT
        cpu = self.gaps.cpu_before(call, began, is_wait) if self.cpu else 0.0
        computes, sleeps = self.gaps.divided(gap, cpu - self.cpu if cpu else _UNKNOWN)
        was_looked_at = gap <= SHORT_GAP or call.cpu_returned
        self._cpu_at_call = self.cpu + computes if self.cpu and was_looked_at else 0.0
        return computes, sleeps

    def does(self, call: Call, whole: Call | None, starts_only: bool) -> None:
        """It makes the call, or waits for its end. `whole`: the function for objects of which the call is a part."""
        if whole is not None:
            back, cpu = whole.ended, self.gaps.cpu_behind(whole, 0.0)
        elif starts_only:
            back, cpu = call.returned, self.gaps.cpu_returned(call, self._cpu_at_call)
        else:
            back, cpu = call.ended, self.gaps.cpu_behind(call, self._cpu_at_call)
        if back >= self.back:
            self.back, self.cpu = back, cpu


def _of_gaps(process: Process) -> _Gaps:
    """What a rank does between its calls, by the accounts of its whole process."""
    look = process.look
    if look.seconds < _FEWEST_SEEN * process.seconds or not look.cpu_of_thread:
        return _Gaps(1.0, process.computes_in_waits)
    in_calls = sum(sums.seconds for place, sums in process.sums.items() if place.group is not None)
    gaps = max(1e-9, look.seconds * (1 - min(1.0, in_calls / process.seconds)))
    # Backends copy in the thread that waits: that is no part of the gaps.
    in_waits = process.computes_in_waits * in_calls * look.seconds / process.seconds
    return _Gaps(min(1.0, max(0.0, look.cpu_of_thread - in_waits) / gaps), process.computes_in_waits)


def _idle(process: Process, played: Sequence[Played]) -> float:
    """Share of the time in a rank's gaps for which it does not compute that it sleeps; else it waits for a core."""
    computes, sleeps = sum(one.act.computes for one in played), sum(one.act.sleeps for one in played)
    return max(0.0, 1.0 - process.waits_in_gaps * (computes + sleeps) / max(1e-9, sleeps))


def _pause(process: Process, played: Sequence[Played], seconds: float) -> float:
    """Seconds that a rank usually sleeps at a time between its calls; 0 where that is not known.

    The thread gives up its core once in each blocking call; what is beyond that lies in the gaps. `seconds`: that what
    is played took.
    """
    look = process.look
    if not look.pauses or not process.seconds or seconds <= 0:
        return 0.0
    calls = sum(one.count for place, one in process.sums.items() if place.group is not None)
    often = look.pauses - calls * look.seconds / process.seconds
    sleeps = sum(one.act.sleeps for one in played) * look.seconds / seconds
    return sleeps / often if often >= 1.0 else 0.0
