"""The trace of timelines: each rank is a process with threads for its steps, stages, buckets and reductions."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from autoddp.timing.timeline import Bucket, Timeline
from autoddp.trace.drawing import RankTrack, Slice, drawn
from autoddp.trace.order import Part, order_of, reductions_of, step_of


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
    tracks = []
    flows = 0
    for one in ranks:
        tracks.append(_Rank(one, zero, last[one.rank], flows).track())
        flows += len(one.buckets)
    order = order_of(ranks)
    about = {
        "clock_error_ms": {f"rank {one.rank}": round(1e3 * one.error, 6) for one in ranks},
        "reductions": order.reductions,
        "contradictions": order.contradictions,
        "order": str(order),
    }
    return drawn(tracks, "milliseconds on the clock of rank 0", about)


def _earliest(one: Timeline) -> float:
    begins = [span.begin for span in one.spans], [g.ready for g in one.gradients], [b.launched for b in one.buckets]
    return one.began + min([0.0, *one.steps, *itertools.chain(*begins)])


_Last = dict[tuple[int, float], Part]
"""One rank's bucket, by its index and its launch on the clock of rank 0 → the part of that reduction launched last."""


class _Rank:
    """Makes the slices of one rank."""

    def __init__(self, timeline: Timeline, zero: float, last: _Last, flows: int) -> None:
        self._timeline = timeline
        self._zero = zero
        self._last = last
        self._ready = sorted(gradient.ready for gradient in timeline.gradients)
        self._backwards = sorted(span.begin for span in timeline.spans if span.name == "backward")
        self._first_flow = flows

    def track(self) -> RankTrack:
        """What the trace shows of this rank."""
        one = self._timeline
        label = f"clock ±{1e3 * one.error:.3g} ms" if one.error else "clock of rank 0"
        return RankTrack(one.rank, one.host, label, self._threads())

    def _threads(self) -> dict[str, list[Slice]]:
        one = self._timeline
        begins = [min((span.begin for span in one.spans), default=0.0), *one.steps]
        steps = [
            Slice(f"step {number}", self._ns(begin), self._ns(end))
            for number, (begin, end) in enumerate(itertools.pairwise(begins))
            if end >= begin
        ]
        stages = [Slice(span.name, self._ns(span.begin), self._ns(span.end)) for span in one.spans]
        buckets, reductions = [], []
        launched_before = float("-inf")
        for place, bucket in enumerate(sorted(one.buckets, key=lambda b: b.launched)):
            flow = self._first_flow + place
            buckets.append(self._filling(bucket, launched_before, flow))
            reductions.append(self._reduction(bucket, flow))
            launched_before = bucket.launched
        return {"steps": steps, "stages": stages, "buckets": buckets, "reductions": reductions}

    def _filling(self, bucket: Bucket, launched_before: float, flow: int) -> Slice:
        """A slice from the first gradient of this backward pass that was ready after the launch before, to the launch.

        Gradients of passes without a reduction, as in `no_sync`, are none of the bucket's.
        """
        pass_ = bisect_right(self._backwards, bucket.launched)
        began = self._backwards[pass_ - 1] if pass_ else float("-inf")
        first = max(bisect_right(self._ready, launched_before), bisect_left(self._ready, began))
        ready = self._ready[first : bisect_right(self._ready, bucket.launched)]
        begin, end = self._ns(min(ready, default=bucket.launched)), self._ns(bucket.launched)
        told = {"bytes": bucket.bytes, "gradients": len(ready)}
        return Slice(f"bucket {bucket.index}", begin, end, told, flow_out=flow)

    def _reduction(self, bucket: Bucket, flow: int) -> Slice:
        begin, end = self._ns(bucket.launched), self._ns(max(bucket.launched, bucket.ended))
        told: dict[str, Any] = {"bytes": bucket.bytes, "step": step_of(self._timeline, bucket.launched)}
        last = self._last.get((bucket.index, self._timeline.began + bucket.launched))
        waits: tuple[Slice, ...] = ()
        if last is not None and last.rank != self._timeline.rank:
            until = min(end, self._ns(last.launched - self._timeline.began))
            if until > begin:
                told["last rank"] = last.rank
                waits = (Slice(f"waits for rank {last.rank}", begin, until),)
        return Slice(f"all-reduce of bucket {bucket.index}", begin, end, told, waits, flow_in=flow)

    def _ns(self, seconds: float) -> int:
        """Nanoseconds in the trace, from seconds since this rank's timeline began."""
        return round((self._timeline.began + seconds - self._zero) * 1e9)
