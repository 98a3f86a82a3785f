"""A node as a drawing, one plain SVG file: GPUs and NICs by NUMA node and switch, links in the colour of their class.

Geometry only: what is drawn was decided in `topology`.
"""

from __future__ import annotations

from html import escape
from itertools import combinations

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
    """The whole file."""
    drawing = _Drawing(node)
    body = "\n".join([*drawing.frames, *drawing.links, *drawing.boxes, *drawing.legend()])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {drawing.width} {drawing.height}" '
        f'width="{drawing.width}" height="{drawing.height}" font-family="sans-serif" font-size="12">\n'
        f"<title>{escape(node.host or 'a node')}</title>\n"
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


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
        self.frames.append(_text(left + 8, self._top - 18, title, "start"))
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
        for nic in self._node.nics:
            speed = f"{nic.speed_mbit / 1e3:g} Gbit/s" if nic.speed_mbit else ""
            if nic.kind == "physical" and nic.numa == number:
                things.append((nic.name, speed))
        for name, below in things:
            self.boxes.append(_box(x, lower, name, below, "#f4e3f4"))
            for gpu in self._node.near.get(name, ()):
                if gpu in self._middle:
                    ends = (x + _WIDTH / 2, lower, self._middle[gpu], self._top + _HEIGHT)
                    self.links.append(_line(*ends))
            x += _WIDTH + _GAP
        return x

    def _arcs(self) -> None:
        for a, b in combinations(sorted(self._middle), 2):
            pair = self._node.pair(a, b)
            kind = "NV" if pair.nvlinks else pair.relation
            if kind is not None:
                title = f"GPU{a}-GPU{b}: {f'NV{pair.nvlinks}' if pair.nvlinks else kind}"
                self.links.append(_arc(self._middle[a], self._middle[b], self._top, _COLOURS[kind], title))

    def legend(self) -> list[str]:
        """The classes and their colours, below everything."""
        y, found = self.height - 24, []
        for place, (kind, colour) in enumerate(_COLOURS.items()):
            x = _PAD + place * 90
            ends = f'x1="{x}" y1="{y - 16}" x2="{x + 60}" y2="{y - 16}"'
            found.append(f'<line {ends} stroke="{colour}" stroke-width="3"/>')
            found.append(_text(x, y, _NAMES[kind], "start", 10))
        return found


def _rectangle(x: float, y: float, width: float, height: float, fill: str, stroke: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{stroke}"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle", size: int = 12) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _box(x: float, y: float, name: str, below: str, fill: str) -> str:
    short = below if len(below) <= 17 else below[:16] + "…"
    middle = x + _WIDTH / 2
    lines = _text(middle, y + 19, name) + _text(middle, y + 35, short, "middle", 9)
    return _rectangle(x, y, _WIDTH, _HEIGHT, fill, "#444444") + lines


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="#a060a0" stroke-dasharray="4 3"/>'


def _arc(x1: float, x2: float, y: float, colour: str, title: str) -> str:
    height = y - 12 - abs(x2 - x1) / (_WIDTH + _GAP) * 14
    path = f"M{x1:g} {y:g} Q{(x1 + x2) / 2:g} {max(height - (y - height), 4):g} {x2:g} {y:g}"
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"><title>{escape(title)}</title></path>'
