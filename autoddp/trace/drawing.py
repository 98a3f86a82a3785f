"""Slices of several processes as events of a trace: each process has threads, each thread has slices.

The format is that of "Trace Event Format", as a JSON object. Perfetto and Chrome draw the slices of one thread inside
each other. So slices of one thread may lie inside each other or apart, but never overlap: those that do overlap are
spread over several threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoddp.version import __version__

_THREADS = 1000  # numbers of threads of each process: no two processes share one, or Perfetto mixes some of them up


@dataclass(frozen=True)
class Slice:
    """Something that lasts. Times are nanoseconds since the trace began.

    They are whole numbers, so that slices that touch do not overlap by rounding.
    """

    name: str
    begin: int
    end: int
    arguments: dict[str, Any] = field(default_factory=dict)
    inside: tuple[Slice, ...] = ()
    """Slices that lie inside this one, one after the other."""
    flow_in: int | None = None
    """The number of the flow that ends at the slice's begin."""
    flow_out: int | None = None
    """The number of the flow that begins at the slice's end."""


@dataclass(frozen=True)
class RankTrack:
    """What the trace shows of one rank."""

    rank: int
    host: str
    label: str
    """How far its clock is right."""
    threads: Mapping[str, Sequence[Slice]]
    """Name of each thread → its slices."""


def drawn(tracks: Sequence[RankTrack], times: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """A trace of these ranks as an object to be written as JSON.

    `times`: what the times in it are. `about`: what else a reader of the trace should know.
    """
    events = [event for one in tracks for event in _events_of(one)]
    told = {"autoddp": __version__, "times": times, **about}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": told}


def _events_of(one: RankTrack) -> Iterator[dict[str, Any]]:
    """All events of a rank; those that name the process and its threads come first."""
    pid = one.rank + 1  # 0 is the idle process in Perfetto
    yield _name(pid, "process_name", {"name": f"rank {one.rank} on {one.host}" if one.host else f"rank {one.rank}"})
    yield _name(pid, "process_sort_index", {"sort_index": one.rank})
    yield _name(pid, "process_labels", {"labels": one.label})
    number = 0
    for name, slices in one.threads.items():
        for lane, of_lane in enumerate(_lanes(slices), start=1):
            number += 1
            tid = pid * _THREADS + number
            yield _name(pid, "thread_name", {"name": name if lane == 1 else f"{name} {lane}"}, tid)
            yield _name(pid, "thread_sort_index", {"sort_index": number}, tid)
            for part in of_lane:
                yield from _event_of(part, name, {"pid": pid, "tid": tid})


def _name(pid: int, what: str, arguments: dict[str, Any], tid: int | None = None) -> dict[str, Any]:
    thread = {} if tid is None else {"tid": tid}
    return {"ph": "M", "name": what, "pid": pid, **thread, "args": arguments}


def _event_of(part: Slice, category: str, place: dict[str, int]) -> Iterator[dict[str, Any]]:
    whole = {"name": part.name, "cat": category, "ph": "X", "ts": _us(part.begin), "dur": _us(part.end - part.begin)}
    yield {**whole, **place, "args": part.arguments}
    flow = {"name": "launch", "cat": "launch", **place}
    if part.flow_in is not None:
        yield {**flow, "ph": "f", "bp": "e", "id": part.flow_in, "ts": _us(part.begin)}
    if part.flow_out is not None:
        # At its very end the slice would be over already, and the arrow would begin at nothing.
        yield {**flow, "ph": "s", "id": part.flow_out, "ts": _us(max(part.begin, part.end - 1))}
    for inner in part.inside:
        yield from _event_of(inner, category, place)


def _us(nanoseconds: int) -> float:
    """The format's unit; a double holds the nanoseconds of a trace of some days exactly enough."""
    return nanoseconds / 1000


def _lanes(slices: Sequence[Slice]) -> list[list[Slice]]:
    """The slices in their order, in as few lists as needed for no two of a list to overlap; one list at least."""
    lanes: list[list[Slice]] = [[]]
    for one in sorted(slices, key=lambda one: (one.begin, one.end)):
        free = next((lane for lane in lanes if not lane or lane[-1].end <= one.begin), None)
        if free is None:
            lanes.append(free := [])
        free.append(one)
    return lanes
