"""The trace of a recording: each rank is a process with threads for its steps, its calls, and what is in flight."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from autoddp.diagnose.collectives.recording import Call, Recording
from autoddp.diagnose.collectives.steps import Steps
from autoddp.diagnose.collectives.stretches import ends_of_steps, shown
from autoddp.diagnose.collectives.table import waits_for
from autoddp.trace import RankTrack, Slice, drawn


def trace_of_calls(recording: Recording, steps: Steps) -> dict[str, Any]:
    """A trace of usual steps of the ranks of this host, as an object to be written as JSON; see `trace.drawn`.

    What is in flight is drawn until the script has waited for it: when it ended before that, nobody knows.
    """
    part = shown(recording, steps)
    kept = {
        rank: [call for call in one.calls if call.began < part.end and call.ended > part.begin]
        for rank, one in recording.of_rank.items()
    }
    zero = min([part.begin, *(call.began for calls in kept.values() for call in calls)])
    waits: dict[int, tuple[int, float]] = {}
    for of_ranks in recording.whole.values():
        if any(part.begin < call.ended and call.began < part.end for call in of_ranks.values()):
            last, seconds = waits_for(of_ranks) or (-1, {})
            waits |= {id(of_ranks[rank]): (last, waited) for rank, waited in seconds.items() if rank != last}
    tracks = []
    for rank, calls in sorted(kept.items()):
        process = recording.of_rank[rank]
        ends = [at for at in ends_of_steps(process, steps) if part.begin <= at <= part.end]
        threads = _Threads(zero, waits).of(calls, ends, steps.unit)
        tracks.append(RankTrack(rank, process.host, "clock of this host", threads))
    about = {"steps_by": steps.how, "ranks_not_seen": recording.missing}
    return drawn(tracks, "milliseconds on the clock of this host", about)


class _Threads:
    """Makes the slices of one rank."""

    def __init__(self, zero: float, waits: dict[int, tuple[int, float]]) -> None:
        self._zero, self._waits = zero, waits

    def of(self, calls: Sequence[Call], ends: Sequence[float], unit: str) -> dict[str, list[Slice]]:
        """Name of each thread → its slices."""
        of_groups = [call for call in calls if call.place.group is not None]
        around = [call for call in calls if call.place.is_for_objects or call.place.is_about_groups]
        pending = [call for call in of_groups if not call.is_blocking and call.wait_ended > call.returned]
        waits = [self._slice(f"wait for {_name(one)}", one.wait_began, one.wait_ended, one) for one in pending]
        in_flight = [self._slice(_name(one), one.returned, one.wait_ended, one) for one in pending]
        return {
            f"{unit}s": [
                Slice(f"{unit} {number}", self._ns(begin), self._ns(end))
                for number, (begin, end) in enumerate(pairwise(ends))
            ],
            "calls": [self._call(one) for one in of_groups] + waits,
            "objects and groups": [self._slice(_name(one), one.began, one.ended, one) for one in around],
            "in flight until waited for": in_flight,
        }

    def _call(self, call: Call) -> Slice:
        last, waited = self._waits.get(id(call), (-1, 0.0))
        begin, until = self._ns(call.began), self._ns(call.began + waited)
        inside = (Slice(f"waits for rank {last}", begin, until),) if until > begin else ()
        return self._slice(_name(call), call.began, call.back, call, inside)

    def _slice(self, name: str, begin: float, end: float, call: Call, inside: tuple[Slice, ...] = ()) -> Slice:
        told: dict[str, Any] = {"line": f"{call.place.file}:{call.place.line}", "bytes": call.bytes}
        if call.place.group is not None:
            told |= {"ranks": str([*call.place.group.ranks]), "number": call.number}
        return Slice(name, self._ns(begin), max(self._ns(begin), self._ns(end)), told, inside)

    def _ns(self, seconds: float) -> int:
        return round((seconds - self._zero) * 1e9)


def _name(call: Call) -> str:
    return f"{call.place.collective} {call.place.where}"
