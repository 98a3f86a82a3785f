"""A link as a drawing: bus bandwidth over message size, one line per layout, its model dashed. One plain SVG file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autoddp.bench import BenchResult, Sweep, busbw
from autoddp.report.bench_tables import world_of
from autoddp.report.svg import document, element, line, round_step, text, title_of
from autoddp.units import data_size

_COLOURS = {"within": "#2e8b57", "between": "#d06000", "all": "#2f5fd0"}
_GRID = "#dddddd"
_WIDTH, _HEIGHT = 760, 440  # pixels, of all
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 46, 56  # margins around the axes
_MODEL_STEPS = 8  # points of the model's line from one measured size to the next


def svg(result: BenchResult) -> str:
    """The content of an SVG file."""
    plot, title = _Plot(result), f"all-reduce, {world_of(result.facts)}"
    lines = (part for sweep in result.sweeps for part in plot.sweep(sweep))
    return document(_WIDTH, _HEIGHT, title, [text(_WIDTH / 2, 20, title), *plot.axes(), *lines, *plot.legend()])


class _Plot:
    """Size on a logarithmic axis, bandwidth on a linear one from 0."""

    def __init__(self, result: BenchResult) -> None:
        self._sweeps = result.sweeps
        self._sizes = sorted({point.bytes for sweep in result.sweeps for point in sweep.points})
        first, last = self._sizes[0], self._sizes[-1]
        self._first, self._span = math.log2(first), max(math.log2(last / first), 1.0)
        highest = max(busbw(p.bytes, p.seconds, s.ranks) for s in result.sweeps for p in s.points)
        self._step = round_step(highest / 4)  # five to ten ticks or so
        self._top = math.ceil(highest / self._step) * self._step

    def sweep(self, sweep: Sweep) -> Iterator[str]:
        """The model dashed, the measured sizes as dots with their numbers as titles."""
        colour = _COLOURS[sweep.layout]
        measured = [(p.bytes, busbw(p.bytes, p.seconds, sweep.ranks)) for p in sweep.points]
        if sweep.model is not None:
            steps = range((len(measured) - 1) * _MODEL_STEPS + 1)
            low, ratio = measured[0][0], measured[-1][0] / measured[0][0]
            curve = [low * ratio ** (step / steps[-1]) for step in steps]
            model = [(size, busbw(int(size), sweep.model.seconds(size), sweep.ranks)) for size in curve]
            yield self._line(model, colour, stroke_dasharray="4 4", opacity="0.6")
        yield self._line(measured, colour)
        for size, bandwidth in measured:
            label = title_of(f"{sweep.layout}, {data_size(size)}: {bandwidth:.3g} GB/s")
            yield element("circle", label, cx=self._x(size), cy=self._y(bandwidth), r=3.5, fill=colour)

    def axes(self) -> Iterator[str]:
        """Grid, ticks and what the axes show."""
        for number in range(round(self._top / self._step) + 1):
            y = self._y(number * self._step)
            yield line(_LEFT, y, _WIDTH - _RIGHT, y, _GRID)
            yield text(_LEFT - 8, y + 4, f"{number * self._step:.4g}", "end")
        for size in self._sizes[:: max(1, math.ceil(len(self._sizes) / 8))]:
            x = self._x(size)
            yield line(x, _TOP, x, _HEIGHT - _BOTTOM, _GRID)
            yield text(x, _HEIGHT - _BOTTOM + 18, data_size(size).replace(".0 ", " "))
        yield text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 14, "message size per rank")
        yield text(_LEFT - 8, _TOP - 12, "busbw, GB/s")

    def legend(self) -> Iterator[str]:
        """One entry for each layout, and one for the model."""
        names = [(f"{sweep.layout} ({sweep.ranks} ranks)", _COLOURS[sweep.layout]) for sweep in self._sweeps]
        for place, (name, colour) in enumerate([*names, ("model", "#666666")]):
            x = _LEFT + 70 + place * 150
            dashes = {"stroke_dasharray": "4 4"} if name == "model" else {}
            yield line(x, 34, x + 24, 34, colour, stroke_width=2, **dashes)
            yield text(x + 30, 38, name, "start")

    def _line(self, points: Sequence[tuple[float, float]], colour: str, **more: str) -> str:
        places = " ".join(f"{self._x(size):.1f},{self._y(bandwidth):.1f}" for size, bandwidth in points)
        return element("polyline", points=places, fill="none", stroke=colour, stroke_width=2, **more)

    def _x(self, size: float) -> float:
        return _LEFT + (math.log2(size) - self._first) / self._span * (_WIDTH - _LEFT - _RIGHT)

    def _y(self, bandwidth: float) -> float:
        return _HEIGHT - _BOTTOM - bandwidth / self._top * (_HEIGHT - _TOP - _BOTTOM)
