"""The pictures of report.html: geometry only. A picture is made of rows, each with a name, an SVG and a value.

Horizontal places are in percent, and text keeps its size, so a row is as readable on a telephone as on a desk. Colours
are classes of the page's style sheet, which has them for light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low

from autoddp.report.page_content import Bucket, Mended, RankStages, Standing, Timeline, Trial
from autoddp.report.svg import element, round_step, title_of
from autoddp.units import data_size, milliseconds

STAGES = {
    "data": "waiting for a batch of the loader",
    "copy": "copying the batch to the device",
    "buffers": "broadcasting the model's buffers",
    "forward": "computing the model's output and the loss",
    "backward": "computing gradients; reductions that run meanwhile cost nothing here",
    "transfer": "the last gradients travel, and nothing is computed",
    "waiting": "this rank has finished its gradients and waits for a later rank",
    "optimizer": "updating the parameters",
    "other": "all else, such as logging, evaluating and clearing gradients",
}
"""The stages that the page shows, with what happens in each. `exposed` is shown as its two parts."""
_MANY_RANKS = 8  # from here on cells have no numbers, and a rank's row of a timeline is thin
_MANY_BUCKETS = 3  # rows of buckets for each rank
_FEWEST_COLUMNS = 8  # places for trials, so that the column of a single one is not as wide as the page
_NOTABLE = 0.03  # share of a step from which a rank's stage is marked, as for findings


@dataclass(frozen=True)
class Row:
    """A line of a picture."""

    name: str
    svg: str
    value: str = ""
    below: str = ""
    """A second line of text."""
    kind: str = ""
    """Class of the row in the style sheet."""


def stages_of(one: RankStages) -> dict[str, float]:
    """Milliseconds of each of `STAGES`, none of them below 0."""
    apart = {"transfer": one.exposed_ms - one.waiting_ms, "waiting": min(one.waiting_ms, one.exposed_ms)}
    return {name: max(apart[name] if name in apart else getattr(one, f"{name}_ms"), 0.0) for name in STAGES}


def usual_stages(ranks: Sequence[RankStages]) -> dict[str, float]:
    """The means over the ranks."""
    each = [stages_of(one) for one in ranks]
    return {name: sum(stages[name] for stages in each) / len(each) for name in STAGES}


def stage_bars(as_written: Sequence[RankStages], mended: Sequence[RankStages], mended_ms: float | None) -> list[Row]:
    """A step as written, and one with all causes mended: one bar each, of the stages' colours where they are known."""
    bars = [("as written", usual_stages(as_written))]
    if mended:
        bars.append(("all mended", usual_stages(mended)))
    elif mended_ms is not None:
        bars.append(("all mended", {"all": mended_ms}))
    longest = max(sum(stages.values()) for _, stages in bars)
    return [Row(name, _stacked(stages, longest), _ms(sum(stages.values()))) for name, stages in bars]


def _stacked(stages: dict[str, float], longest: float) -> str:
    parts, left = [], 0.0
    for name, ms in stages.items():
        label = f"{name}: {_ms(ms)}" if name in STAGES else f"a step: {_ms(ms)}"
        parts.append(_box(left, left + ms, longest, 0, 26, f"s-{name}", label))
        left += ms
    return _svg(26, "stages of a step", parts)


def waterfall(steps: Sequence[Mended]) -> list[Row]:
    """A bar for each cause: the step that is left after mending it too, then what that gave."""
    longest = max(step.step_ms for step in steps)
    rows = []
    for before, step in zip((None, *steps), steps, strict=False):
        parts = [_box(0, step.step_ms, longest, 0, 22, "left", f"a step takes {_ms(step.step_ms)}")]
        below = ""
        if before is not None:
            saved = before.step_ms - step.step_ms
            what = "saved" if saved >= 0 else "lost"
            left, right = sorted((step.step_ms, before.step_ms))
            parts.append(_box(left, right, longest, 0, 22, what, f"{what}: {_ms(abs(saved))}"))
            below = f"{_ms(abs(saved))} {'less' if saved >= 0 else 'more'}"
        rows.append(Row(step.cause, _svg(22, "a step", parts), _ms(step.step_ms), below))
    return rows


def heat_map(ranks: Sequence[RankStages]) -> list[Row]:
    """A row for each stage, a cell for each rank: the more colour, the more time. Outlined is what stands out."""
    each = [stages_of(one) for one in ranks]
    most = max((ms for stages in each for ms in stages.values()), default=0.0) or 1.0
    step = max(sum(stages.values()) for stages in each)
    rows = []
    for name in STAGES:
        column = [stages[name] for stages in each]
        usual = median_low(column)
        parts: list[str] = []
        for place, (one, ms) in enumerate(zip(ranks, column, strict=True)):
            stands_out = name != "waiting" and ms - usual > _NOTABLE * step  # the one that is late does not wait
            label = f"{_rank(one.rank, one.host)}, {name}: {_ms(ms)}"
            parts += _cell(place, len(ranks), ms / most, stands_out, label, ms)
        rows.append(Row(name, _svg(24, f"{name} on each rank", parts), _from_to(min(column), max(column))))
    return [*rows, Row("rank", _svg(16, "ranks", _rank_numbers([one.rank for one in ranks])), kind="axis")]


def _cell(place: int, count: int, share: float, stands_out: bool, label: str, ms: float) -> Iterator[str]:
    look = {"class": "hot" if stands_out else "cell", "fill-opacity": f"{0.06 + 0.94 * share:.2f}"}
    left, width = _percent(place, count), _percent(1, count)
    yield element("rect", title_of(label), x=left, y=1, width=width, height=22, **look)
    if count <= _MANY_RANKS:
        number = f"{ms:.1f}" if ms < 9.95 else f"{ms:.0f}"
        yield _words(place + 0.5, count, 16, number)


def _rank_numbers(numbers: Sequence[int]) -> Iterator[str]:
    every = 1
    while len(numbers) / every > _MANY_RANKS:
        every *= 2
    for place in range(0, len(numbers), every):
        yield _words(place + 0.5, len(numbers), 12, str(numbers[place]))


@dataclass(frozen=True)
class OneStep:
    """One step of all ranks."""

    rows: list[Row]
    number: int
    """Number of the step among those recorded, from 1."""
    error_ms: float
    """By how much the ranks' clocks may be apart."""
    aligned: bool
    """False where the clocks cannot be right: then each rank begins at its own 0."""
    buckets: int
    """Number of buckets of the rank with the most."""
    no_buckets: str
    """Why there are none, where it is known."""


def one_step(timelines: Sequence[Timeline]) -> OneStep | None:
    """The step whose length is the median; None where no step was recorded."""
    known = sorted((one for one in timelines if one.steps), key=lambda one: one.rank)
    if not known:
        return None
    lengths = [max(_length(one, number) for one in known) for number in range(min(len(one.steps) for one in known))]
    number = sorted(range(len(lengths)), key=lambda place: lengths[place])[len(lengths) // 2]
    if lengths[number] <= 0:
        return None
    begins = [one.began + _begin(one, number) for one in known]
    first, aligned = min(begins), max(begins) - min(begins) < lengths[number]
    starts = [begin - first if aligned else 0.0 for begin in begins]
    window = max(start + _length(one, number) for start, one in zip(starts, known, strict=True))
    lanes = [_Lane(one, number, start, window) for start, one in zip(starts, known, strict=True)]
    thin = len(known) > _MANY_RANKS
    rows = [lane.row(thin) for lane in lanes]
    axis = Row("ms", _svg(16, "milliseconds", _ticks(window)), kind="axis thin" if thin else "axis")
    error = max(one.error for one in known) * 1e3
    return OneStep(
        [*rows, axis], number + 1, error, aligned, max(len(lane.buckets) for lane in lanes), known[0].no_buckets
    )


def _begin(one: Timeline, number: int) -> float:
    return one.steps[number - 1] if number else 0.0


def _length(one: Timeline, number: int) -> float:
    return one.steps[number] - _begin(one, number)


class _Lane:
    """One step of one rank; `start` is where it begins in a window of `window` seconds."""

    def __init__(self, timeline: Timeline, number: int, start: float, window: float) -> None:
        self._timeline, self._window = timeline, window
        self._begin, self._end = _begin(timeline, number), timeline.steps[number]
        self._start = start
        self.buckets = [one for one in timeline.buckets if self._begin <= one.launched < self._end]

    def row(self, thin: bool) -> Row:
        one, high, low = self._timeline, *((7, 3) if thin else (16, 5))
        parts = [
            self._box(span.begin, span.end, 0, high, f"s-{span.name}", span.name)
            for span in one.spans
            if span.end > self._begin and span.begin < self._end
        ]
        places = _side_by_side(self.buckets, 1 if thin else _MANY_BUCKETS)
        for bucket, place in zip(self.buckets, places, strict=True):
            label = f"bucket {bucket.index}, {data_size(bucket.bytes)}"
            top = high + 2 + place * (low + 1)
            parts.append(self._box(bucket.launched, bucket.ended, top, low, "bucket", label))
        height = high + 2 + (max(places, default=0) + 1) * (low + 1)
        length = _ms((self._end - self._begin) * 1e3)
        name = str(one.rank) if thin else _rank(one.rank, one.host)
        return Row(name, _svg(height, f"a step of rank {one.rank}", parts), "" if thin else length, kind="thin" * thin)

    def _box(self, begin: float, end: float, top: int, height: int, kind: str, label: str) -> str:
        ends = [max(begin, self._begin), end if kind == "bucket" else min(end, self._end)]
        left, right = (self._start + end - self._begin for end in ends)
        told = f"{_rank(self._timeline.rank, self._timeline.host)}, {label}: {_from_to(left * 1e3, right * 1e3)}"
        return _box(left, min(right, self._window), self._window, top, height, kind, told)


def _side_by_side(buckets: Sequence[Bucket], most: int) -> list[int]:
    """The row of each bucket, so that two that travel at once do not cover each other as long as there are rows."""
    free = [-math.inf] * most
    rows = []
    for bucket in buckets:
        row = next((row for row, until in enumerate(free) if until <= bucket.launched), most - 1)
        free[row] = max(free[row], bucket.ended)
        rows.append(row)
    return rows


def _ticks(window: float) -> Iterator[str]:
    step = round_step(window * 1e3 / 2.5)  # three to six ticks or so
    for number in range(int(window * 1e3 / step) + 1):
        yield _words(number * step, window * 1e3, 12, f"{number * step:g}")


def ladder(entries: Sequence[Standing]) -> list[Row]:
    """The speed-up of each rung with its interval, on a logarithmic scale with a line at ×1."""
    ends = [math.log(end) for one in entries for end in (one.speedup.low, one.speedup.high, one.speedup.ratio)]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    room = max((high - low) * 0.05, 0.05)
    low, span = low - room, high - low + 2 * room
    rows = []
    for one in entries:
        gain = one.speedup
        left, dot, right = (_percent(math.log(end) - low, span) for end in (gain.low, gain.ratio, gain.high))
        kind = "sure" if gain.low > 1 else "unsure" if gain.high >= 1 else "slower"
        zero = _percent(-low, span)
        parts = [
            element("line", x1=zero, x2=zero, y1=0, y2=26, **{"class": "one"}),
            element("line", x1=left, x2=right, y1=13, y2=13, **{"class": f"interval {kind}"}),
            *(element("line", x1=x, x2=x, y1=8, y2=18, **{"class": f"interval {kind}"}) for x in (left, right)),
            element("circle", title_of(f"{one.rung}: {gain}"), cx=dot, cy=13, r=5, **{"class": kind}),
        ]
        rows.append(Row(one.rung, _svg(26, "speed-up", parts), str(gain)))
    return rows


def trials(records: Sequence[Trial], as_written: float | None) -> str:
    """A column for each trial, or a mark if it has no time, a tick where the prediction was, a line as written."""
    height = 120.0
    times = [time for one in records for time in (one.seconds, one.predicted) if time is not None]
    longest = max([*times, as_written or 0.0], default=0.0) or 1.0
    parts, places = [], max(len(records), _FEWEST_COLUMNS)
    for place, one in enumerate(records):
        left, width, right = (_percent(share, places) for share in (place + 0.12, 0.76, place + 0.88))
        if one.seconds is not None:
            tall = one.seconds / longest * height
            told = f"{milliseconds(one.seconds)} ms" + (f", {one.says}" if one.says else "")
            label = title_of(f"trial {one.number}, {one.rung}: {told}")
            parts.append(element("rect", label, x=left, y=height - tall, width=width, height=tall, **_of_rung(one)))
        else:
            label = title_of(f"trial {one.number}, {one.rung}: {one.says}")
            y = height - 4
            parts.append(element("line", label, x1=left, x2=right, y1=y, y2=y, **{"class": "no-time"}))
        if one.predicted is not None:
            y = height - one.predicted / longest * height
            label = title_of(f"trial {one.number}, predicted: {milliseconds(one.predicted)} ms")
            parts.append(element("line", label, x1=left, x2=right, y1=y, y2=y, **{"class": "predicted"}))
    if as_written is not None:
        y = height - as_written / longest * height
        label = title_of(f"as written: {milliseconds(as_written)} ms")
        parts.append(element("line", label, x1="0%", x2="100%", y1=y, y2=y, **{"class": "one"}))
    return _svg(height, "milliseconds per step of each trial", parts)


RUNGS = ("exact", "near", "lossy", "batch")


def _of_rung(one: Trial) -> dict[str, str]:
    return {"class": f"r-{one.rung}" if one.rung in RUNGS else "r-other"}


def _svg(height: float, label: str, parts: Iterable[str]) -> str:
    return element("svg", title_of(label) + "".join(parts), role="img", width="100%", height=height)


def _box(left: float, right: float, longest: float, top: float, height: float, kind: str, label: str) -> str:
    known = kind if kind in _KINDS else "s-other"
    places: dict[str, str | float] = {"x": _percent(left, longest), "width": _percent(max(right - left, 0.0), longest)}
    return element("rect", title_of(label), **places, y=top, height=height, **{"class": known})


_KINDS = {*(f"s-{name}" for name in STAGES), "s-exposed", "s-all", "left", "saved", "lost", "bucket"}


def _words(place: float, longest: float, y: float, words: str) -> str:
    share = place / longest if longest else 0.0
    anchor = "start" if share < 0.03 else "end" if share > 0.97 else "middle"
    return element("text", words, x=_percent(place, longest), y=y, **{"text-anchor": anchor})


def _percent(value: float, of: float) -> str:
    return f"{value / of * 100 if of else 0.0:.2f}%"


def _ms(ms: float) -> str:
    return f"{milliseconds(ms / 1e3)} ms" if ms else "0 ms"


def _from_to(low: float, high: float) -> str:
    first, last = _ms(low), _ms(high)
    return last if first == last else f"{first.removesuffix(' ms')} to {last}"


def _rank(number: int, host: str) -> str:
    return f"rank {number} on {host}" if host else f"rank {number}"
