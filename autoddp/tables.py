"""Floor 1. Tables as plain text for stdout: columns are aligned by blanks, without borders."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from autoddp.log import WIDTH, printable, printable_lines

_WITHOUT_LIMIT = 100_000  # columns; far more than any row has


def aligned(rows: Sequence[Sequence[str]], numbers: bool = False) -> str:
    """`rows` as text with aligned columns. With `numbers` all columns but the first are aligned to the right.

        aligned([("hook", "1 MiB"), ("fp16", "0.21")], numbers=True)

    On a terminal, text that is too long for its column continues on the next line of that column. Elsewhere each row is
    one line, however long, so that programs can parse it.
    """
    return text_of([grid(rows, numbers)], width_of_stdout())


def aligned_or_below(rows: Sequence[Sequence[str]]) -> str:
    """Columns as of `aligned`; on a narrow terminal each row's cells stand below its first one, with their headings.

    For rows with cells of several words, such as the settings of a configuration: a narrow column would break these.
    """
    heads = [f"  {head}" for head in rows[0][1:]]
    blocks: list[RenderableType] = []
    for first, *cells in rows[1:]:
        blocks += [Text(printable(f"{rows[0][0]} {first}")), grid(list(zip(heads, cells, strict=True)))]
    return text_of([Fitting(grid(rows), Group(*blocks))], width_of_stdout())


def width_of_stdout() -> int:
    """Columns of the terminal; as good as endless where stdout is none, so that each row stays one line."""
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    return Console().width or WIDTH if on_terminal else _WITHOUT_LIMIT  # 0 columns, as COLUMNS=0 has it: not known


def grid(rows: Sequence[Sequence[str]], numbers: bool = False) -> Table:
    """`rows` as a table of rich, for printing on the caller's own console; `numbers` as for `aligned`."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for place in range(len(rows[0])):
        table.add_column(justify="right" if numbers and place else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))  # in a plain string, `[0]` would be markup
    return table


class Fitting:
    """A table, or something narrower where the terminal has too few columns for it.

    rich would take some from each column, and with them the last digits of numbers and the ends of words.
    """

    def __init__(self, table: Table, narrow: RenderableType) -> None:
        self._table, self._narrow = table, narrow

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        needs = console.measure(self._table, options=options.update(width=_WITHOUT_LIMIT)).maximum
        yield self._table if needs <= options.max_width else self._narrow


class Harmless:
    """What rich would print of another renderable, without control characters: rich itself lets escapes pass.

    To be printed on a console with `LITERAL`.
    """

    def __init__(self, inner: RenderableType) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._inner, options):
            yield segment if segment.control else Segment(printable_lines(segment.text), segment.style)


LITERAL: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
"""For rich's Console: a plain string is shown as it is, and `[red]` in it is no colour."""


def text_of(parts: Iterable[RenderableType], width: int) -> str:
    """`parts` rendered by rich as plain text, in lines of at most `width` columns without trailing blanks."""
    # rich's own `capture` also writes to stdout, which fails if that is full or closed.
    text = io.StringIO()
    # FORCE_COLOR makes a terminal of it, and with TERM=dumb one of 80 columns.
    console = Console(file=text, width=width, color_system=None, force_terminal=False, **LITERAL)
    for part in parts:
        console.print(Harmless(part))
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip("\n").split("\n"))
