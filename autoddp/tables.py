"""Floor 0. Tables as text for stdout: columns aligned by blanks, nothing drawn around them."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

_WITHOUT_LIMIT = 100_000  # columns; no row of ours comes near it


def aligned(rows: Sequence[Sequence[str]], numbers: bool = False) -> str:
    """The rows with their columns aligned; `numbers`: all columns but the first to the right.

        aligned([("hook", "1 MiB"), ("fp16", "0.21")], numbers=True)

    On a terminal what is too long for its column goes on in the next line of that column. Elsewhere each row is one
    line, however long, so that a program can take it apart.
    """
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    return text_of([grid(rows, numbers)], Console().width if on_terminal else _WITHOUT_LIMIT)


def grid(rows: Sequence[Sequence[str]], numbers: bool = False) -> Table:
    """The same as rich's table, to be printed on a console of one's own."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for place in range(len(rows[0])):
        table.add_column(justify="right" if numbers and place else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # rich would take `[0]` in a plain string for markup
    return table


def text_of(parts: Iterable[RenderableType], width: int) -> str:
    """What rich draws of them as plain text, in lines of at most `width` columns without blanks at their ends."""
    # rich's own capture writes to stdout all the same, which fails where that is full or closed
    text = io.StringIO()
    console = Console(file=text, width=width, color_system=None, highlight=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip("\n").split("\n"))
