"""What each place of a script costs that calls collectives: how often, how many bytes, how long, and who comes last.

Ranks leave an all-reduce nearly together. So the shortest duration of one call over the ranks is its transfer, and what
a rank has beyond it is waiting for ranks that are late. No clocks are needed for that. In a broadcast or a scatter the
ranks wait until the root begins, and in a gather or a reduce the root waits until the last of them does: the ranks of a
host have one clock. Of sends, and of calls that the script does not wait for at once, the table says only how long the
script has stood in them.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoddp.diagnose.collectives.recording import Call, Group, Place, Recording, Sums
from autoddp.units import data_size, percent

_ALL_LEAVE_TOGETHER = (
    *("allreduce", "all_reduce", "allgather", "all_gather", "_allgather", "reduce_scatter", "_reduce_scatter"),
    *("alltoall", "all_to_all", "barrier", "monitored_barrier"),
)
_FROM_ROOT, _TO_ROOT = ("broadcast", "scatter"), ("gather", "reduce")
SMALL = 256 * 1024
"""Bytes of a call, at most, that takes as long as the ranks need to meet, whatever it moves."""
_MUCH = 0.1  # of the time of a rank
_CLEARLY = 0.5  # of the calls, from which a rank is the last one
_SEVERAL = 2  # calls of a step
_FEWEST = 8  # calls, from which it is told who is last


def leave_together(method: str) -> bool:
    """Whether all ranks leave a call of this method of a group nearly at one time."""
    return method.startswith(_ALL_LEAVE_TOGETHER)


@dataclass(frozen=True)
class Row:
    """One place of the script with one collective, over all groups of one size that it is called for."""

    where: str
    """ "train.py:12"."""
    file: str
    line: int
    function: str
    collective: str
    groups: tuple[Group, ...]
    ranks: tuple[int, ...]
    """Ranks that have called it."""
    calls_per_second: float
    """Calls of each of these ranks."""
    bytes_per_call: float
    share: float
    """Share of the time of these ranks, spent in the calls and in waits for their ends."""
    waiting: float | None
    """Share of their time for which they waited for ranks that were late; None where that cannot be told."""
    last: int | None
    """The rank that comes last in most calls."""
    last_in: float
    """Share of the calls in which it does."""
    is_blocking: bool
    """Whether the script could not go on meanwhile, in most calls."""
    count: int
    """Calls of all ranks."""

    @property
    def transfer(self) -> float | None:
        """Share of the time for which data moved, or the ranks only met."""
        return None if self.waiting is None else max(0.0, self.share - self.waiting)

    @property
    def group(self) -> str:
        """The groups in words."""
        size = len(self.groups[0].ranks)
        if len(self.groups) > 1:
            return f"{len(self.groups)} of {size} ranks"
        ranks = self.groups[0].ranks
        if ranks == tuple(range(ranks[0], ranks[0] + size)) and size > 2:
            return f"ranks {ranks[0]}-{ranks[-1]}"
        return f"ranks {','.join(map(str, ranks[:6]))}{',…' if size > 6 else ''}"

    def plain(self) -> dict[str, Any]:
        """For JSON; shares are of the time of the ranks that call it."""
        return {
            "file": self.file,
            "line": self.line,
            "function": self.function,
            "collective": self.collective,
            "groups": [list(group.ranks) for group in self.groups],
            "backend": self.groups[0].backend,
            "ranks": list(self.ranks),
            "calls": self.count,
            "calls_per_second": round(self.calls_per_second, 3),
            "bytes_per_call": round(self.bytes_per_call, 1),
            "share": round(self.share, 5),
            "waiting": None if self.waiting is None else round(self.waiting, 5),
            "transfer": None if self.transfer is None else round(self.transfer, 5),
            "last_rank": self.last,
            "last_in": round(self.last_in, 3),
            "blocking": self.is_blocking,
        }


def table(recording: Recording) -> list[Row]:
    """All rows, the one that takes the largest share of the time first."""
    found: dict[tuple[Any, ...], dict[int, dict[Place, Sums]]] = {}
    for rank, process in recording.of_rank.items():
        for place, sums in process.sums.items():
            if place.group is not None and sums.count:
                key = (place.file, place.line, place.collective, len(place.group.ranks))
                found.setdefault(key, {}).setdefault(rank, {})[place] = sums
    durations = _waiting_of_calls(recording)
    rows = [_row(recording, of_ranks, durations) for of_ranks in found.values()]
    return sorted(rows, key=lambda row: -row.share * len(row.ranks))


def beside_ddp(verdict: Sequence[str], found: float, rows: Sequence[Row], step: float) -> list[str]:
    """The verdict on a DDP job, with a line where a collective of the script's own takes much.

    `found`: the largest share of a step that is proved to be saved. What takes more than that comes first. `step`:
    seconds of a step.
    """
    alike: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        alike.setdefault((row.collective, row.ranks), []).append(row)
    dearest_ones = max(alike.values(), key=_sum_of_shares, default=list[Row]())
    takes_in_all = _sum_of_shares(dearest_ones)
    if takes_in_all < _MUCH:
        return [*verdict]
    dearest, *others = sorted(dearest_ones, key=lambda row: -row.share)
    line = f"{dearest.where} {dearest.collective}"
    if others:
        line += f" and {len(others)} other line{'s' * (len(others) > 1)} with that call take"
    else:
        line += " takes"
    takes = f"DDP, {line} {percent(takes_in_all)} of the time of a rank{_why_it_takes_much(dearest, step)}"
    if takes_in_all <= found:
        return [*verdict, f"beside {takes}"]
    return [f"Beside {takes}", *(one.replace("Nothing found", "Nothing else found") for one in verdict)]


def _sum_of_shares(rows: Sequence[Row]) -> float:
    return sum(row.share for row in rows)


def _why_it_takes_much(row: Row, step: float) -> str:
    """The end of a sentence, as far as the row alone tells it; nothing of it was tried."""
    if row.waiting is not None and row.waiting > row.share / 2:
        late = "ranks that come later" if row.last is None else f"rank {row.last}"
        return f", most of it waiting for {late}: look at what is done there before that line"
    if "object" in row.collective:
        return (
            ". Suspected: it pickles what it sends, and sends the sizes first; where these objects are numbers, send "
            "them as a tensor, or in fewer steps"
        )
    calls, size = round(row.calls_per_second * step), row.bytes_per_call
    if calls < _SEVERAL or not 0 < size <= SMALL:
        return ""
    return (
        f", in {calls} calls of {data_size(round(size))} in each step. Suspected: such small calls take as long as the "
        "ranks need to meet; make fewer of them (by an option, where a library makes them), with more in each, where "
        "none is computed from another's result"
    )


def calls_of(sums: dict[Place, Sums]) -> int:
    """How often the function was called whose parts these places are.

    Parts of one call, as those of `all_gather_object`, have been called equally often.
    """
    by_group: dict[Group | None, list[int]] = {}
    for place, one in sums.items():
        by_group.setdefault(place.group, []).append(one.count)
    return sum(max(counts) if max(counts) - min(counts) <= 1 else sum(counts) for counts in by_group.values())


def _row(
    recording: Recording, of_ranks: dict[int, dict[Place, Sums]], durations: dict[Place, dict[int, _Waiting]]
) -> Row:
    places = list(dict.fromkeys(place for sums in of_ranks.values() for place in sums))
    first = places[0]
    count = sum(calls_of(sums) for sums in of_ranks.values())
    size = sum(one.bytes for sums in of_ranks.values() for one in sums.values())
    seconds = {rank: recording.of_rank[rank].seconds or 1.0 for rank in of_ranks}
    in_calls = {rank: sum(one.seconds for one in sums.values()) for rank, sums in of_ranks.items()}
    waited = [durations[place] for place in places if place in durations]
    waiting = None
    if waited:
        # Of single calls that were kept, scaled to all calls.
        shares = [
            sum(of.get(rank, _Waiting()).seconds for of in waited) / kept * in_calls[rank] / seconds[rank]
            for rank in of_ranks
            if (kept := sum(of.get(rank, _Waiting()).of for of in waited))
        ]
        waiting = statistics.fmean(shares) if shares else None
    lasts = Counter[int]()
    for of in waited:
        for rank, one in of.items():
            lasts[rank] += one.last
    told = sum(lasts.values())
    last, times = lasts.most_common(1)[0] if told else (None, 0)
    clearly = told >= _FEWEST and times > _CLEARLY * told and len(first.group.ranks if first.group else ()) > 1
    kept_calls = [call for rank in of_ranks for call in recording.of_rank[rank].calls if call.place in set(places)]
    return Row(
        where=first.where,
        file=first.file,
        line=first.line,
        function=first.function,
        collective=first.collective,
        groups=tuple(sorted({place.group for place in places if place.group is not None})),
        ranks=tuple(sorted(of_ranks)),
        calls_per_second=count / sum(seconds.values()),
        bytes_per_call=size / count if count else 0.0,
        share=statistics.fmean(min(1.0, in_calls[rank] / seconds[rank]) for rank in of_ranks),
        waiting=waiting,
        last=last if clearly else None,
        last_in=times / told if told else 0.0,
        is_blocking=2 * sum(call.is_blocking for call in kept_calls) >= len(kept_calls),
        count=count,
    )


@dataclass
class _Waiting:
    """One rank's calls of one place."""

    seconds: float = 0.0
    """Seconds of waiting for late ranks."""
    of: float = 0.0
    """Seconds of the calls in which that was looked at."""
    last: int = 0
    """Calls in which it came last."""


def _waiting_of_calls(recording: Recording) -> dict[Place, dict[int, _Waiting]]:
    found: dict[Place, dict[int, _Waiting]] = {}
    for calls in recording.whole.values():
        waits = waits_for(calls)
        if waits is None:
            continue
        late = max(calls, key=lambda rank: calls[rank].began)
        for rank, call in calls.items():
            one = found.setdefault(call.place, {}).setdefault(rank, _Waiting())
            one.seconds += waits[1][rank]
            one.of += call.seconds
            one.last += rank == late
    return found


def waits_for(calls: Mapping[int, Call]) -> tuple[int, dict[int, float]] | None:
    """The rank for which the others wait in one call, and the seconds of each; None where that is not known."""
    methods, roots = {call.place.method for call in calls.values()}, {_root(call) for call in calls.values()}
    if len(calls) < 2 or not all(call.is_blocking for call in calls.values()):
        return None
    if all(map(leave_together, methods)):
        least = min(call.seconds for call in calls.values())
        last = max(calls, key=lambda rank: calls[rank].began)
        return last, {rank: call.seconds - least for rank, call in calls.items()}
    if len(roots) > 1 or (root := roots.pop()) not in calls:
        return None
    others = calls.keys() - {root}
    if methods <= {*_FROM_ROOT}:
        late, waiting = root, others
    elif methods <= {*_TO_ROOT}:
        late, waiting = max(others, key=lambda rank: calls[rank].began), {root}
    else:
        return None
    waits = {rank: min(call.seconds, max(0.0, calls[late].began - call.began)) for rank, call in calls.items()}
    return late, {rank: seconds if rank in waiting else 0.0 for rank, seconds in waits.items()}


def _root(call: Call) -> int:
    """The rank that sends to the others, or collects; -1 where all do the same."""
    return call.place.group.ranks[call.root] if call.root >= 0 and call.place.group is not None else -1


def different_calls(recording: Recording) -> str:
    """A call in which ranks of one group ask for different things, as a sentence without a period; else ""."""
    for (group, number), calls in _different(recording)[:1]:
        each = [f"rank {rank} calls {call.place.collective} ({call.place.where})" for rank, call in calls.items()]
        which = ", ".join(map(str, group.ranks))
        return f"ranks {which} do not make the same calls: in call {number + 1} {', '.join(sorted(each))}"
    return ""


def before_different_calls(recording: Recording) -> Recording | None:
    """The calls before those in which ranks ask for different things; None if that is less than half of a rank's.

    Ranks with unlike numbers of batches part in the end, and their steps before that are as those of others.
    """
    until = min((call.began for _, calls in _different(recording) for call in calls.values()), default=math.inf)
    kept = [replace(one, calls=[call for call in one.calls if call.began < until]) for one in recording.processes]
    if any(2 * len(one.calls) < len(whole.calls) for one, whole in zip(kept, recording.processes, strict=True)):
        return None
    return replace(recording, processes=kept)


def _different(recording: Recording) -> list[tuple[tuple[Group, int], dict[int, Call]]]:
    """The calls in which ranks of one group ask for different things, in the order of their numbers."""
    in_order = sorted(recording.of_calls.items(), key=lambda one: one[0][1])
    return [(key, calls) for key, calls in in_order if len({call.place.method for call in calls.values()}) > 1]
