"""A node as a drawing, one plain SVG file: GPUs and NICs by NUMA node and switch, links in the colour of their class.

This file holds geometry only; the facts come from `topology`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from autoddp.report.svg import document, element, line, text, title_of
from autoddp.topology import Gpu, Node, switches

_COLOURS = {"NV": "#2e8b57", "PIX": "#1f9fd0", "PXB": "#2f5fd0", "PHB": "#d0a000", "NODE": "#e07000", "SYS": "#d03030"}
_NAMES = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several switches",
    "PHB": "host bridge",
    "NODE": "NUMA node",
    "SYS": "across sockets",
}
_WIDTH, _HEIGHT, _GAP, _PAD = 96, 44, 14, 18  # of a box, between boxes, around a group: pixels


def svg(node: Node) -> str:
    """The content of an SVG file."""
    drawing = _Drawing(node)
    parts = [*drawing.frames, *drawing.links, *drawing.boxes, *drawing.legend()]
    return document(drawing.width, drawing.height, node.host or "a node", parts)


class _Drawing:
    """Boxes from left to right, NUMA node by NUMA node; arcs between GPUs above them, NICs below."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._top = 40 + 16 * max(2, len(node.gpus))  # room for the widest arc
        self._middle: dict[int, float] = {}
        self.frames: list[str] = []
        self.boxes: list[str] = []
        self.links: list[str] = []
        x = float(_PAD)
        known = {gpu.numa for gpu in node.gpus} | {port.numa for port in node.rdma}
        for number in sorted(known, key=lambda n: (n is None, n)) or [None]:
            x = self._numa(number, x)
        self._arcs()
        self.width = int(max(x + _PAD, 560))
        self.height = self._top + 2 * _HEIGHT + 150

    def _numa(self, number: int | None, x: float) -> float:
        left = x
        x += _PAD
        gpus = [gpu for gpu in self._node.gpus if gpu.numa == number]
        for group in switches(self._node, gpus):
            x = self._switch(group, x)
        x = max(x, self._network(number, left + _PAD))
        title = "NUMA node not known" if number is None else f"NUMA {number}"
        frame = _rectangle(left, self._top - 34, x - left, 2 * _HEIGHT + 100, "#f6f6f6", "#999999")
        self.frames[:0] = [frame]
        self.frames.append(text(left + 8, self._top - 18, title, "start"))
        return x + _PAD

    def _switch(self, group: list[Gpu], x: float) -> float:
        width = len(group) * (_WIDTH + _GAP) - _GAP
        if len(group) > 1:
            self.frames.append(_rectangle(x - 6, self._top - 8, width + 12, _HEIGHT + 16, "#eaf4fb", "#1f9fd0"))
        for gpu in group:
            self._middle[gpu.index] = x + _WIDTH / 2
            self.boxes.append(_box(x, self._top, f"GPU{gpu.index}", gpu.name, "#dff2e6"))
            x += _WIDTH + _GAP
        return x + (_GAP if len(group) > 1 else 0)

    def _network(self, number: int | None, x: float) -> float:
        """RDMA ports and physical NICs of one NUMA node, each joined to the GPUs nearest to it."""
        lower = self._top + _HEIGHT + 34
        things = [
            (port.device, f"{port.rate_gbps:g} Gbit/s" if port.rate_gbps else port.state or "")
            for port in self._node.rdma
            if port.numa == number
        ]
        things += [
            (nic.name, f"{nic.speed_mbit / 1e3:g} Gbit/s" if nic.speed_mbit else "")
            for nic in self._node.nics
            if nic.kind == "physical" and nic.numa == number
        ]
        for name, below in things:
            self.boxes.append(_box(x, lower, name, below, "#f4e3f4"))
            for gpu in (gpu for gpu in self._node.near.get(name, ()) if gpu in self._middle):
                ends = (x + _WIDTH / 2, lower, self._middle[gpu], self._top + _HEIGHT)
                self.links.append(line(*ends, "#a060a0", stroke_dasharray="4 3"))
            x += _WIDTH + _GAP
        return x

    def _arcs(self) -> None:
        for a, b in combinations(sorted(self._middle), 2):
            pair = self._node.pair(a, b)
            kind = "NV" if pair.nvlinks else pair.relation
            if kind is not None:
                title = f"GPU{a}-GPU{b}: {f'NV{pair.nvlinks}' if pair.nvlinks else kind}"
                self.links.append(_arc(self._middle[a], self._middle[b], self._top, _COLOURS[kind], title))

    def legend(self) -> Iterator[str]:
        """The classes and their colours, below everything."""
        y = self.height - 24
        for place, (kind, colour) in enumerate(_COLOURS.items()):
            x = _PAD + place * 90
            yield line(x, y - 16, x + 60, y - 16, colour, stroke_width=3)
            yield text(x, y, _NAMES[kind], "start", font_size=10)


def _rectangle(x: float, y: float, width: float, height: float, fill: str, stroke: str) -> str:
    return element("rect", x=x, y=y, width=width, height=height, rx=6, fill=fill, stroke=stroke)


def _box(x: float, y: float, name: str, below: str, fill: str) -> str:
    short = below if len(below) <= 17 else below[:16] + "…"
    words = text(x + _WIDTH / 2, y + 19, name) + text(x + _WIDTH / 2, y + 35, short, font_size=9)
    return _rectangle(x, y, _WIDTH, _HEIGHT, fill, "#444444") + words


def _arc(x1: float, x2: float, y: float, colour: str, title: str) -> str:
    height = y - 12 - abs(x2 - x1) / (_WIDTH + _GAP) * 14
    path = f"M{x1:g} {y:g} Q{(x1 + x2) / 2:g} {max(height - (y - height), 4):g} {x2:g} {y:g}"
    return element("path", title_of(title), d=path, fill="none", stroke=colour, stroke_width=2)
