"""Makes one call of several that follow each other, lets them run side by side, or leaves some out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from autoddp.diagnose.collectives.program import NO_CALL, Played, Script, rest, with_
from autoddp.wire.replayed_calls import WAIT, Act

OF_ONE_PIECE = ("allreduce", "broadcast", "allgather", "_allgather_base", "all_gather_single", "reduce", "gather")
"""Methods of a group of which one call of all bytes, one behind the other, does what several calls do."""
_OF_PIECES = ("alltoall", "alltoall_base", "all_to_all_single", "reduce_scatter", "_reduce_scatter_base")
"""Methods with a piece for each rank: of several calls, those for one rank have to stand together."""
MERGEABLE = (*OF_ONE_PIECE, *_OF_PIECES, "reduce_scatter_single")
_LARGEST = 25 * 2**20  # bytes of a merged call, as DDP's buckets


def runs(script: Script, sizes: range) -> dict[tuple[int, int], tuple[int, int]]:
    """Each call that can be merged into an earlier one → the first call of its run.

    A run has calls of one group and one kind, each with a number of bytes in `sizes`. They and what may lie between
    them follow each other at once on every rank. A loop over tensors has some that are smaller: they belong to it.
    What several ranks send, each its own, can be no one call of any of them; nor can a sum and a maximum, nor the
    statistics of a batch norm and its counters, which lie between these. Nor can a call and one that is given what
    comes from its result.
    """
    lines = {one.call.place.where for of_rank in script.played.values() for one in of_rank if one.act.bytes in sizes}
    fits = script.agreed(
        lambda one: (
            one.act.call in MERGEABLE
            and (one.act.bytes in sizes or (0 < one.act.bytes < sizes.start and one.call.place.where in lines))
        )
    )
    found: dict[tuple[int, int], tuple[int, int]] = {}
    total: dict[tuple[int, int], int] = {}
    size = {key: max(one.act.bytes for one in of_ranks.values()) for key, of_ranks in script.of_key.items()}
    first_of: dict[frozenset[tuple[int, str, str]], tuple[int, int]] = {}
    begin = 0
    for key in sorted(script.of_key):
        if not _goes_on(script, key, begin):
            first_of.clear()
            begin = key[1]
        if key not in fits:
            continue
        kind = frozenset(kind_of(one) for one in script.of_key[key].values())
        first = first_of.get(kind)
        if first is None or total[first] + size[key] > _LARGEST:
            first_of[kind], total[key] = key, size[key]
        else:
            found[key] = first
            total[first] += size[key]
    return found


def _goes_on(script: Script, key: tuple[int, int], begin: int) -> bool:
    """Whether a call could be made together with those before it, from the one with the number `begin` on."""
    back = [script.builds.get(one.call.place.of_any_group, 0) for one in script.of_key.get(key, {}).values()]
    return key in script.follows_at_once and not any(0 < one <= key[1] - begin for one in back)


def kind_of(one: Played) -> tuple[int, str, str]:
    """What calls must have in common to become one."""
    return one.act.root, one.call.place.reduction, one.call.place.dtype


def merged(script: Script, into: dict[tuple[int, int], tuple[int, int]]) -> Script:
    """Each run as one call of all its bytes, gathered from as many tensors and put back."""

    def change(played: Sequence[Played]) -> Iterator[Played]:
        whole: dict[tuple[int, int], list[Played]] = {}
        for one in played:
            # What is no call stays where it is: its key is its own.
            key = into.get(one.key, one.key) if one.key != NO_CALL else (NO_CALL[0], len(whole))
            whole.setdefault(key, []).append(one)
        for parts in whole.values():
            first = parts[0]
            act = with_(
                first.act,
                bytes=sum(one.act.bytes for one in parts),
                tensors=len(parts),
                # What is computed between the calls of a run is computed all the same, but for what comes with each.
                computes=first.act.computes + sum(script.least_gap.get(one.key, 0.0) for one in parts[1:]),
                left_out=len(parts) - 1,
            )
            yield Played(act, first.key, first.call) if len(parts) > 1 else first

    return script.changed(change)


def without(script: Script, left_out: Collection[tuple[int, int]]) -> Script:
    """The script without these calls. What a rank does before one of them, it does before the next call."""

    def change(played: Sequence[Played]) -> Iterator[Played]:
        computes, sleeps, calls = 0.0, 0.0, 0
        for one in played:
            gap = {"computes": one.act.computes + computes, "sleeps": one.act.sleeps + sleeps}
            act = with_(one.act, **gap, left_out=one.act.left_out + calls)
            if one.key in left_out:
                computes, sleeps, calls = act.computes, act.sleeps, act.left_out + 1
                continue
            computes, sleeps, calls = 0.0, 0.0, 0
            yield Played(act, one.key, one.call)
        if played:
            yield from rest(computes, sleeps, played[-1])

    return script.changed(change)


def side_by_side(script: Script, into: dict[tuple[int, int], tuple[int, int]]) -> Script:
    """The calls of each run are started one after another, and only then waited for."""

    def change(played: Sequence[Played]) -> Iterator[Played]:
        in_runs, is_open, begin = {*into, *into.values()}, False, 0
        for one in played:
            if not _goes_on(script, one.key, begin):
                if is_open:
                    yield Played(Act(WAIT), NO_CALL, one.call)
                is_open, begin = False, one.key[1]
            is_one = one.key in in_runs
            yield Played(with_(one.act, waits=one.act.waits and not is_one), one.key, one.call)
            is_open = is_open or is_one

    return script.changed(change)


def places_of(script: Script, keys: set[tuple[int, int]]) -> tuple[str, ...]:
    """The lines of the script that make these calls, those first that make most.

    Lines for which torch makes all of them come last: what a script can change is in the others.
    """
    made = [one.call.place for of_rank in script.played.values() for one in of_rank if one.key in keys]
    counts, own = Counter(place.where for place in made), {place.where for place in made if not place.by}
    return tuple(sorted(counts, key=lambda where: (where not in own, -counts[where])))


def calls_at(script: Script, keys: set[tuple[int, int]], where: str) -> list[Played]:
    """Calls of these that one line of the script makes."""
    return [
        one
        for of_rank in script.played.values()
        for one in of_rank
        if one.key in keys and one.call.place.where == where
    ]


def seconds_in(script: Script, keys: set[tuple[int, int]]) -> float:
    """Seconds of a step on average for which the rank that needs longest stands in these calls."""
    most = max(
        (sum(one.call.seconds for one in of_rank if one.key in keys) for of_rank in script.played.values()), default=0.0
    )
    return most / script.covers * script.pace
