"""The few pieces of SVG that the drawings of nodes and links are made of; each function returns text."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from html import escape
from pathlib import Path

from autoddp.errors import UsageError
from autoddp.files import read_at_most
from autoddp.log import printable

_BEGINNING = b"<svg "  # of every drawing that `document` makes


def document(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """A whole file of `width` times `height` pixels on white; it needs no other file, and no script."""
    background = element("rect", width="100%", height="100%", fill="white")
    body = "\n".join(["", title_of(title), background, *parts, ""])
    head: dict[str, str | float] = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width} {height}"}
    return element("svg", body, **head, width=width, height=height, font_family="sans-serif", font_size=12) + "\n"


def require_replaceable(path: Path, option: str) -> None:
    """UsageError where a file that is no drawing stands at `path`, such as the script after `--svg` without a name."""
    if os.path.isfile(path) and read_at_most(path, len(_BEGINNING)) not in (b"", _BEGINNING):
        raise UsageError(f"{option} {printable(str(path))}: not a drawing, so it is not replaced; name another file")


def element(name: str, inside: str = "", /, **attributes: str | float) -> str:
    """`<name …>inside</name>`; `_` in an attribute's name stands for `-`. `inside` is SVG, not text."""
    words = "".join(f' {key.replace("_", "-")}="{_shown(value)}"' for key, value in attributes.items())
    return f"<{name}{words}>{inside}</{name}>" if inside else f"<{name}{words}/>"


def text(x: float, y: float, words: str, anchor: str = "middle", **more: str | float) -> str:
    """Words at a place."""
    return element("text", escape(printable(words)), **{"x": x, "y": y, "text-anchor": anchor, **more})


def line(x1: float, y1: float, x2: float, y2: float, stroke: str, **more: str | float) -> str:
    """A straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, **more)


def title_of(words: str) -> str:
    """What a browser shows while the pointer is on the element that holds it."""
    return element("title", escape(printable(words)))


def round_step(most: float) -> float:
    """The largest distance between two ticks of an axis that is 1, 2 or 5 times a power of ten, and not above `most`.

    >>> [round_step(most) for most in (0.7, 1, 4.9, 6, 30)]
    [0.5, 1.0, 2.0, 5.0, 20.0]
    """
    power = 10.0 ** math.floor(math.log10(most))
    return next((factor * power for factor in (5, 2) if factor * power <= most), power)


def _shown(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")
