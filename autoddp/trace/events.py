"""The events of a trace: each rank is a process with threads for its steps, stages, buckets and reductions.

The format is that of "Trace Event Format", as a JSON object. Perfetto and Chrome draw the slices of one thread inside
each other. So slices of one thread may lie inside each other or apart, but never overlap: reductions that do overlap
are spread over several threads.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autoddp.timing.timeline import Bucket, Timeline
from autoddp.trace.order import Part, order_of, reductions_of, step_of
from autoddp.version import __version__

_THREADS = 1000  # numbers of threads of each process: no two processes share one, or Perfetto mixes some of them up


@dataclass(frozen=True)
class _Slice:
    """Nanoseconds since the trace began: whole numbers, so that slices that touch do not overlap by rounding."""

    name: str
    begin: int
    end: int
    arguments: dict[str, Any] = field(default_factory=dict)
    inside: tuple[_Slice, ...] = ()
    """Slices that lie inside this one, one after the other."""
    flow_in: int | None = None
    """The number of the flow that ends at the slice's begin."""
    flow_out: int | None = None
    """The number of the flow that begins at the slice's end."""


def trace_of(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """A trace of these ranks as an object to be written as JSON; a timeline's `began` puts it beside the others.

    Not promised: that an arrow goes forward in time by more than the clocks' error, which is named in the trace.
    """
    ranks = sorted(timelines, key=lambda one: one.rank)
    last: dict[int, _Last] = defaultdict(dict)
    for reduction in reductions_of(ranks)[0]:
        latest = reduction.last
        for part in reduction.parts:
            last[part.rank][part.bucket.index, part.launched] = latest
    zero = min((_earliest(one) for one in ranks), default=0.0)
    events: list[dict[str, Any]] = []
    flows = 0
    for one in ranks:
        process = _Process(one, zero, last[one.rank], flows)
        events += process.events()
        flows += len(one.buckets)
    order = order_of(ranks)
    told = {
        "autoddp": __version__,
        "times": "milliseconds on the clock of rank 0",
        "clock_error_ms": {f"rank {one.rank}": round(1e3 * one.error, 6) for one in ranks},
        "reductions": order.reductions,
        "contradictions": order.contradictions,
        "order": str(order),
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": told}


def _earliest(one: Timeline) -> float:
    begins = [span.begin for span in one.spans], [g.ready for g in one.gradients], [b.launched for b in one.buckets]
    return one.began + min([0.0, *one.steps, *itertools.chain(*begins)])


_Last = dict[tuple[int, float], Part]
"""One rank's bucket, by its index and its launch on the clock of rank 0 → the part of that reduction launched last."""


class _Process:
    """Makes the events of one rank, which the trace shows as a process."""

    def __init__(self, timeline: Timeline, zero: float, last: _Last, flows: int) -> None:
        self._timeline = timeline
        self._zero = zero
        self._last = last
        self._ready = sorted(gradient.ready for gradient in timeline.gradients)
        self._backwards = sorted(span.begin for span in timeline.spans if span.name == "backward")
        self._pid = timeline.rank + 1  # 0 is the idle process in Perfetto
        self._first_flow = flows

    def events(self) -> list[dict[str, Any]]:
        """All events of this rank; those that name the process and its tracks come first."""
        one = self._timeline
        error = f"clock ±{1e3 * one.error:.3g} ms"
        events = [
            self._name("process_name", {"name": f"rank {one.rank} on {one.host}" if one.host else f"rank {one.rank}"}),
            self._name("process_sort_index", {"sort_index": one.rank}),
            self._name("process_labels", {"labels": error if one.error else "clock of rank 0"}),
        ]
        number = 0
        for name, slices in self._threads().items():
            for lane, of_lane in enumerate(_lanes(slices), start=1):
                number += 1
                tid = self._pid * _THREADS + number
                events.append(self._name("thread_name", {"name": name if lane == 1 else f"{name} {lane}"}, tid))
                events.append(self._name("thread_sort_index", {"sort_index": number}, tid))
                for part in of_lane:
                    events += self._drawn(part, name, tid)
        return events

    def _name(self, what: str, arguments: dict[str, Any], tid: int | None = None) -> dict[str, Any]:
        thread = {} if tid is None else {"tid": tid}
        return {"ph": "M", "name": what, "pid": self._pid, **thread, "args": arguments}

    def _drawn(self, part: _Slice, category: str, tid: int) -> list[dict[str, Any]]:
        place = {"pid": self._pid, "tid": tid}
        whole = {
            "name": part.name,
            "cat": category,
            "ph": "X",
            "ts": _us(part.begin),
            "dur": _us(part.end - part.begin),
        }
        events: list[dict[str, Any]] = [{**whole, **place, "args": part.arguments}]
        flow = {"name": "launch", "cat": "launch", **place}
        if part.flow_in is not None:
            events.append({**flow, "ph": "f", "bp": "e", "id": part.flow_in, "ts": _us(part.begin)})
        if part.flow_out is not None:
            # At its very end the slice would be over already, and the arrow would begin at nothing.
            events.append({**flow, "ph": "s", "id": part.flow_out, "ts": _us(max(part.begin, part.end - 1))})
        for inner in part.inside:
            events += self._drawn(inner, category, tid)
        return events

    def _threads(self) -> dict[str, list[_Slice]]:
        one = self._timeline
        begins = [min((span.begin for span in one.spans), default=0.0), *one.steps]
        steps = [
            _Slice(f"step {number}", self._ns(begin), self._ns(end))
            for number, (begin, end) in enumerate(itertools.pairwise(begins))
            if end >= begin
        ]
        stages = [_Slice(span.name, self._ns(span.begin), self._ns(span.end)) for span in one.spans]
        buckets, reductions = [], []
        launched_before = float("-inf")
        for place, bucket in enumerate(sorted(one.buckets, key=lambda b: b.launched)):
            flow = self._first_flow + place
            buckets.append(self._filling(bucket, launched_before, flow))
            reductions.append(self._reduction(bucket, flow))
            launched_before = bucket.launched
        return {"steps": steps, "stages": stages, "buckets": buckets, "reductions": reductions}

    def _filling(self, bucket: Bucket, launched_before: float, flow: int) -> _Slice:
        """A slice from the first gradient of this backward pass that was ready after the launch before, to the launch.

        Gradients of passes without a reduction, as in `no_sync`, are none of the bucket's.
        """
        pass_ = bisect_right(self._backwards, bucket.launched)
        began = self._backwards[pass_ - 1] if pass_ else float("-inf")
        first = max(bisect_right(self._ready, launched_before), bisect_left(self._ready, began))
        ready = self._ready[first : bisect_right(self._ready, bucket.launched)]
        begin, end = self._ns(min(ready, default=bucket.launched)), self._ns(bucket.launched)
        told = {"bytes": bucket.bytes, "gradients": len(ready)}
        return _Slice(f"bucket {bucket.index}", begin, end, told, flow_out=flow)

    def _reduction(self, bucket: Bucket, flow: int) -> _Slice:
        begin, end = self._ns(bucket.launched), self._ns(max(bucket.launched, bucket.ended))
        told: dict[str, Any] = {"bytes": bucket.bytes, "step": step_of(self._timeline, bucket.launched)}
        last = self._last.get((bucket.index, self._timeline.began + bucket.launched))
        waits: tuple[_Slice, ...] = ()
        if last is not None and last.rank != self._timeline.rank:
            until = min(end, self._ns(last.launched - self._timeline.began))
            if until > begin:
                told["last rank"] = last.rank
                waits = (_Slice(f"waits for rank {last.rank}", begin, until),)
        return _Slice(f"all-reduce of bucket {bucket.index}", begin, end, told, waits, flow_in=flow)

    def _ns(self, seconds: float) -> int:
        """Nanoseconds in the trace, from seconds since this rank's timeline began."""
        return round((self._timeline.began + seconds - self._zero) * 1e9)


def _us(nanoseconds: int) -> float:
    """The format's unit; a double holds the nanoseconds of a trace of some days exactly enough."""
    return nanoseconds / 1000


def _lanes(slices: Sequence[_Slice]) -> list[list[_Slice]]:
    """The slices in their order, in as few lists as needed for no two of a list to overlap; one list at least."""
    lanes: list[list[_Slice]] = [[]]
    for one in sorted(slices, key=lambda one: (one.begin, one.end)):
        free = next((lane for lane in lanes if not lane or lane[-1].end <= one.begin), None)
        if free is None:
            lanes.append(free := [])
        free.append(one)
    return lanes
