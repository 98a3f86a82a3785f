"""Floor 0. Tables as plain text for stdout: columns are aligned by blanks, without borders."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

_WITHOUT_LIMIT = 100_000  # columns; far more than any row has


def aligned(rows: Sequence[Sequence[str]], numbers: bool = False) -> str:
    """`rows` as text with aligned columns. With `numbers` all columns but the first are aligned to the right.

        aligned([("hook", "1 MiB"), ("fp16", "0.21")], numbers=True)

    On a terminal, text that is too long for its column continues on the next line of that column. Elsewhere each row is
    one line, however long, so that programs can parse it.
    """
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    return text_of([grid(rows, numbers)], Console().width if on_terminal else _WITHOUT_LIMIT)


def grid(rows: Sequence[Sequence[str]], numbers: bool = False) -> Table:
    """The same rows as a table of rich, for printing on the caller's own console."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for place in range(len(rows[0])):
        table.add_column(justify="right" if numbers and place else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # in a plain string, rich would interpret `[0]` as markup
    return table


def text_of(parts: Iterable[RenderableType], width: int) -> str:
    """`parts` rendered by rich as plain text, in lines of at most `width` columns without trailing blanks."""
    # rich's own `capture` also writes to stdout, which fails if that is full or closed.
    text = io.StringIO()
    console = Console(file=text, width=width, color_system=None, highlight=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip("\n").split("\n"))
