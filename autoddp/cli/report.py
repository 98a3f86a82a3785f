"""`autoddp report [RUN]` writes report.html of a run anew, from its summary.json; `autoddp report A B` compares two."""

from __future__ import annotations

import argparse
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoddp.cli.parser import Parser
from autoddp.codec import decode
from autoddp.errors import NothingReadable, UsageError, first_line
from autoddp.log import printable, printable_lines, show, show_json, tell
from autoddp.runs.latest import newest
from autoddp.runs.usual_folders import usual_folders

_SUMMARY, _REPORT = "summary.json", "report.html"
_MOST = 64 * 2**20  # bytes; a summary of a hundred trials has a quarter of a million


def run(arguments: list[str]) -> int:
    """The exit code of `autoddp report` with these arguments.

        run([])                                             # the newest run in .autoddp
        run(["before", "after"])                            # prints what has changed from one run to the other
        run([".autoddp/20251121-200000-host-4711"])         # this run
        run(["summary.json", "--output", "train.html"])

    Prints where the page is. AutoddpError where there is no summary, or the page cannot be written.
    """
    options = _parser().parse_args(arguments)
    if "" in (*options.runs, options.output):
        raise UsageError(f"report: a name is empty; name a run's folder or its {_SUMMARY}")
    if len(options.runs) > 2:
        raise UsageError(f"report: {len(options.runs)} runs; name one, or two to compare")
    if len(options.runs) == 2:
        if options.output is not None:
            raise UsageError("report: --output is for the page of one run; two runs are compared on standard output")
        return _compare([_summary_of(Path(run)) for run in options.runs], options.json)
    if options.json:
        raise UsageError("report: --json is for two runs, which are compared; of one, read its summary.json")
    place = _summary_of(Path(options.runs[0])) if options.runs else _newest()
    page = place.with_name(_REPORT) if options.output is None else Path(options.output)
    content = _read(place)
    from autoddp.report.page import write_page

    try:
        left_out = write_page(page, content)
    except ValueError as problem:
        raise NothingReadable(f"report: {printable(str(place))}: {first_line(problem)}") from None
    except OSError as problem:
        why = problem.strerror or str(problem)
        raise UsageError(
            f"report: {printable(str(page))}: cannot be written: {why}; name a file with --output"
        ) from None
    if left_out:
        others = f" (and {len(left_out) - 1} more, which the page names)" if left_out[1:] else ""
        tell(
            f"warning: report: {place}: a part of the summary is wrong and left out of the page: {left_out[0]}{others}"
        )
    show(str(page))
    return 0


def _compare(places: Sequence[Path], as_json: bool) -> int:
    from autoddp.report.comparison import compare
    from autoddp.report.page_content import page_content

    sides = []
    for place in places:
        try:
            sides.append(page_content(_read(place)))
        except ValueError as problem:
            raise NothingReadable(f"report: {printable(str(place))}: {first_line(problem)}") from None
    try:
        found = compare(sides[0], sides[1])
    except ValueError as problem:
        raise NothingReadable(f"report: {problem}") from None
    if as_json:
        show_json(found.plain())
    else:
        for line in found.lines():
            show(printable_lines(line))
    return 0


def _newest() -> Path:
    output = usual_folders().output
    found = newest(output, _SUMMARY)
    if found is None:
        raise UsageError(f"report: no run in {output} has a {_SUMMARY}; name a run's folder, or tune: autoddp train.py")
    return found


def _summary_of(place: Path) -> Path:
    return place / _SUMMARY if os.path.isdir(place) else place  # which is no error for a name that is too long


def _read(place: Path) -> dict[str, Any]:
    name = printable(str(place))
    try:
        if not stat.S_ISREG(place.stat().st_mode):
            raise UsageError(f"report: {name}: no regular file; name a run's folder or its {_SUMMARY}")
        if place.stat().st_size > _MOST:
            raise NothingReadable(f"report: {name}: larger than {_MOST >> 20} MiB, so not the summary of a run")
        text = place.read_bytes()
    except OSError as problem:
        why = os.strerror(problem.errno or 0)
        raise UsageError(f"report: {name}: {why}; name a run's folder or its {_SUMMARY}") from None
    try:
        return decode(text, dict)
    except ValueError as problem:
        why = f"not the summary of a run: {first_line(problem)}"
        raise NothingReadable(f"report: {name}: {why}; name a run's folder or its {_SUMMARY}") from None


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="autoddp report",
        allow_abbrev=False,
        description="Write a run's report.html anew from its summary.json: one file for a browser, which needs no "
        "server, no script and nothing from outside. Given two runs, print what has changed from the first to the "
        "second, for example before and after a new driver.",
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="*",
        help="a run's folder or its summary.json (the newest in .autoddp); two of them are compared",
    )
    parser.add_argument("--json", action="store_true", help="print the comparison of two runs as one JSON document")
    parser.add_argument("--output", metavar="FILE", help="the page (report.html beside the summary)")
    return parser
