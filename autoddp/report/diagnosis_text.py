"""A diagnosis on a terminal: its verdict, a usual step of each rank in stages, the findings, and the waterfall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoddp.diagnose import Diagnosis, Finding
from autoddp.tables import Fitting, grid
from autoddp.timing import STAGES, RankAnatomy
from autoddp.units import milliseconds

_MOST_ROWS = 16  # ranks in the table; of more, those with the longest steps of their own


def parts(diagnosis: Diagnosis, boxed: bool) -> list[RenderableType]:
    """All but the verdict, to be printed one after another."""
    found: list[RenderableType] = [_steps(diagnosis.anatomy, boxed)]
    if diagnosis.findings:
        found.append(_findings(diagnosis.findings))
    if len(diagnosis.waterfall) > 1:
        levels = " → ".join(f"{one.cause} {milliseconds(one.seconds)}" for one in diagnosis.waterfall)
        found.append(Text(f"ms per step with each mended as well: {levels}"))
    found += [Text(f"not measured: {sentence}") for sentence in diagnosis.not_measured]
    return found


def for_stdout(diagnosis: Diagnosis) -> list[RenderableType]:
    """Verdict and all, for `autoddp diagnose`."""
    return [*(Text(line) for line in diagnosis.verdict), *parts(diagnosis, boxed=False)]


def _look(boxed: bool) -> dict[str, Any]:
    look: dict[str, Any] = {"pad_edge": False} if boxed else {"box": None, "padding": (0, 2, 0, 0)}
    return look | {"title_justify": "left", "title_style": "bold"}


def _steps(ranks: Sequence[RankAnatomy], boxed: bool) -> RenderableType:
    return Fitting(_table(ranks, boxed), _table(ranks, boxed=False, narrow=True))


def _table(ranks: Sequence[RankAnatomy], boxed: bool, narrow: bool = False) -> Table:
    shown = sorted(sorted(ranks, key=lambda one: -one.own)[:_MOST_ROWS], key=lambda one: one.rank)
    # A stage that takes no time on any rank is left out.
    stages = [name for name in STAGES if any(one.stages[name] >= _NOTHING for one in ranks)]
    title = "a step of each rank (ms)"
    if len(shown) < len(ranks):
        title += f", of the {_MOST_ROWS} of {len(ranks)} ranks that need longest by themselves"
    hosts = {one.host for one in ranks}
    names_hosts = not narrow or len(hosts) != 1
    if not names_hosts:
        title += f", on {shown[0].host}"
    table = Table(title=title, **_look(boxed) | ({"padding": (0, 1, 0, 0)} if narrow else {}))
    waiting = "of it\nwaiting" if narrow else "of it waiting"
    columns = [*stages, *([waiting] if "exposed" in stages else []), "step"]
    if "exposed" in stages:  # behind the stage that it is a part of
        columns.remove(waiting)
        columns.insert(columns.index("exposed") + 1, waiting)
    for name in ("rank", *(["host"] if names_hosts else []), *columns):
        table.add_column(name, justify="left" if name == "host" else "right", no_wrap=name != "host")
    for one in shown:
        values = {**one.stages, waiting: one.waiting, "step": one.step}
        host = [Text(one.host)] if names_hosts else []
        table.add_row(str(one.rank), *host, *(milliseconds(values[name]) for name in columns))
    return table


_NOTHING = 5e-5  # seconds


def _findings(findings: Sequence[Finding]) -> RenderableType:
    rows, blocks = [("cause", "ms per step (99 %)", "", "what was seen, and what to change")], list[RenderableType]()
    for one in findings:
        price, range_ = milliseconds(one.seconds), ""
        if one.low is not None and one.high is not None:
            range_ = f"{milliseconds(one.low)} to {milliseconds(one.high)}"
        rows.append((one.cause, f"{price} ({range_})" if range_ else price, one.status, one.text))
        rows.append(("", "", "fix", one.fix))
        says = f"{price} ms per step{f' (99 % interval: {range_})' if range_ else ''}, {one.status}"
        blocks += [Text(f"{one.cause}: {says}"), grid([("  seen", one.text), ("  fix", one.fix)])]
    # Beside three other columns a terminal has a third of its width for the sentences, and would break their words.
    return Fitting(grid(rows), Group(*blocks))
