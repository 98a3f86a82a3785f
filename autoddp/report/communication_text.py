"""What a script communicates by itself, on a terminal: the answer, the findings, and the table of its collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoddp.diagnose.collectives import CommunicationDiagnosis
from autoddp.diagnose.collectives.table import Row
from autoddp.units import milliseconds, percent

_MOST_ROWS = 12
_LEAST_SHARE = 0.005  # of the time, from which a row is shown


def for_stdout(diagnosis: CommunicationDiagnosis) -> list[RenderableType]:
    """All of it, for `autoddp diagnose` of a script without DDP."""
    found: list[RenderableType] = [*(Text(line) for line in diagnosis.verdict), rows(diagnosis.rows)]
    found += _findings(diagnosis)
    if diagnosis.replayed:
        found.append(Text(f"how true prices are: {diagnosis.replayed}"))
    found += [Text(f"not measured: {sentence}") for sentence in diagnosis.not_measured]
    return found


def rows(of_script: Sequence[Row]) -> RenderableType:
    """The table of collectives. Shares are of the time of the ranks that call them."""
    table = Table(
        title="the script's own collectives, by place and group (shares of the time)",
        box=None,
        padding=(0, 1, 0, 0),
        title_justify="left",
        title_style="bold",
    )
    for name in ("place", "collective", "group"):
        table.add_column(name, overflow="fold")
    for name in ("calls/s", "KiB", "time", "waiting", "transfer", "last"):
        table.add_column(name, justify="right", no_wrap=True)
    shown = [row for row in of_script if row.share >= _LEAST_SHARE][:_MOST_ROWS] or of_script[:_MOST_ROWS]
    for row in shown:
        last = "-" if row.last is None else f"{row.last} ({percent(row.last_in)})"
        table.add_row(
            Text(row.where),
            Text(row.collective if row.is_blocking else f"{row.collective} (async)"),
            Text(row.group),
            f"{row.calls_per_second:.{0 if row.calls_per_second >= 10 else 2}f}",
            f"{row.bytes_per_call / 1024:.{1 if row.bytes_per_call >= 1024 else 2}f}" if row.bytes_per_call else "-",
            percent(row.share),
            "-" if row.waiting is None else percent(row.waiting),
            "-" if row.transfer is None else percent(row.transfer),
            last,
        )
    if len(of_script) > len(shown):
        table.caption = f"and {len(of_script) - len(shown)} that take less, see --json"
        table.caption_justify = "left"
    return table


def _findings(diagnosis: CommunicationDiagnosis) -> Iterator[RenderableType]:
    """Each finding in a few lines. What to change for the first one stands in the answer."""
    for number, one in enumerate(diagnosis.findings):
        price = milliseconds(one.seconds)
        if one.low is not None and one.high is not None:
            price += f" ({milliseconds(one.low)} to {milliseconds(one.high)})"
        head = f"{one.cause}, {one.status}: {price} of {milliseconds(diagnosis.steps.seconds)} ms per "
        yield Text(f"{head}{diagnosis.steps.unit}", style="bold")
        yield Padding(Text(f"{one.text}."), (0, 0, 0, 2))
        if number:
            yield Padding(Text(f"Fix: {one.fix}"), (0, 0, 0, 2))
