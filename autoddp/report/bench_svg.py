"""A link as a drawing: bus bandwidth over message size, one line per layout, its model dashed. One plain SVG file."""

from __future__ import annotations

import math
from html import escape

from autoddp.bench import BenchResult, Sweep, busbw
from autoddp.units import data_size

_COLOURS = {"within": "#2e8b57", "between": "#d06000", "all": "#2f5fd0"}
_WIDTH, _HEIGHT = 760, 440  # pixels, of all
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 46, 56  # margins around the axes
_MODEL_STEPS = 8  # points of the model's line from one measured size to the next


def svg(result: BenchResult) -> str:
    """The whole file; it needs no other, and no script."""
    plot = _Plot(result)
    facts = result.facts
    nodes = f"{facts.nodes} node{'s' if facts.nodes > 1 else ''}"
    title = f"all-reduce, {facts.world_size} ranks on {nodes}, {facts.backend}, {' and '.join(facts.devices)}"
    lines = [line for sweep in result.sweeps for line in plot.sweep(sweep)]
    body = "\n".join([*plot.axes(), *lines, *plot.legend()])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" font-family="sans-serif" font-size="12">\n<title>{escape(title)}</title>\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{_text(_WIDTH / 2, 20, title)}\n{body}\n</svg>\n'
    )


class _Plot:
    """Size on a logarithmic axis, bandwidth on a linear one from 0."""

    def __init__(self, result: BenchResult) -> None:
        self._sweeps = result.sweeps
        sizes = sorted({point.bytes for sweep in result.sweeps for point in sweep.points})
        self._sizes = sizes
        self._first, self._span = math.log2(sizes[0]), max(math.log2(sizes[-1] / sizes[0]), 1.0)
        highest = max(busbw(p.bytes, p.seconds, s.ranks) for s in result.sweeps for p in s.points)
        self._step = _round_step(highest)
        self._top = math.ceil(highest / self._step) * self._step

    def sweep(self, sweep: Sweep) -> list[str]:
        """The model dashed, the measured sizes as dots with their numbers as titles."""
        colour = _COLOURS[sweep.layout]
        found = []
        measured = [(p.bytes, busbw(p.bytes, p.seconds, sweep.ranks)) for p in sweep.points]
        if sweep.model is not None:
            steps = range((len(measured) - 1) * _MODEL_STEPS + 1)
            low, ratio = measured[0][0], measured[-1][0] / measured[0][0]
            curve = [low * ratio ** (step / steps[-1]) for step in steps]
            model = [(size, busbw(int(size), sweep.model.seconds(size), sweep.ranks)) for size in curve]
            found.append(self._line(model, colour, ' stroke-dasharray="4 4" opacity="0.6"'))
        found.append(self._line(measured, colour, ""))
        for size, bandwidth in measured:
            label = f"{sweep.layout}, {data_size(size)}: {bandwidth:.3g} GB/s"
            place = f'cx="{self._x(size):.1f}" cy="{self._y(bandwidth):.1f}"'
            found.append(f'<circle {place} r="3.5" fill="{colour}"><title>{label}</title></circle>')
        return found

    def axes(self) -> list[str]:
        """Grid, ticks and what the axes show."""
        found = []
        for number in range(round(self._top / self._step) + 1):
            y = self._y(number * self._step)
            found.append(_rule(_LEFT, y, _WIDTH - _RIGHT, y))
            found.append(_text(_LEFT - 8, y + 4, f"{number * self._step:.4g}", "end"))
        for size in self._sizes[:: max(1, math.ceil(len(self._sizes) / 8))]:
            x = self._x(size)
            found.append(_rule(x, _TOP, x, _HEIGHT - _BOTTOM))
            found.append(_text(x, _HEIGHT - _BOTTOM + 18, data_size(size).replace(".0 ", " ")))
        found.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 14, "message size per rank"))
        found.append(_text(_LEFT - 8, _TOP - 12, "busbw, GB/s"))
        return found

    def legend(self) -> list[str]:
        """One entry for each layout, and one for the model."""
        found = []
        names = [(f"{sweep.layout} ({sweep.ranks} ranks)", _COLOURS[sweep.layout], "") for sweep in self._sweeps]
        for place, (name, colour, dashes) in enumerate([*names, ("model", "#666666", ' stroke-dasharray="4 4"')]):
            x = _LEFT + 70 + place * 150
            line = f'<line x1="{x}" y1="34" x2="{x + 24}" y2="34" stroke="{colour}" stroke-width="2"{dashes}/>'
            found += [line, _text(x + 30, 38, name, "start")]
        return found

    def _line(self, points: list[tuple[float, float]] | list[tuple[int, float]], colour: str, more: str) -> str:
        places = " ".join(f"{self._x(size):.1f},{self._y(bandwidth):.1f}" for size, bandwidth in points)
        return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"{more}/>'

    def _x(self, size: float) -> float:
        return _LEFT + (math.log2(size) - self._first) / self._span * (_WIDTH - _LEFT - _RIGHT)

    def _y(self, bandwidth: float) -> float:
        return _HEIGHT - _BOTTOM - bandwidth / self._top * (_HEIGHT - _TOP - _BOTTOM)


def _round_step(highest: float) -> float:
    """1, 2 or 5 times a power of ten, so that an axis up to `highest` has five to ten ticks or so."""
    power = 10.0 ** math.floor(math.log10(highest / 4))
    return next(factor * power for factor in (5, 2, 1) if factor * power <= highest / 4)


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
