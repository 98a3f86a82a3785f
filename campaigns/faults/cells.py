"""Many long cases, some at a time, each with its bound and its line. A case that fails stops none of the others.

Results go to a file, one JSON line each. What that file has of the same commit is not run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launchers import ROOT

NOT_TRIED = "not tried"


@dataclass
class Result:
    """What came of one case. `row` and `column` place it in the table; `bound` and `seconds` are its time."""

    name: str
    row: str
    column: str
    bound: float
    outcome: str = ""
    """"" until it has run; `NOT_TRIED` with a reason where this machine cannot."""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    """What was not as it must be; empty: it was."""
    figures: dict[str, Any] = field(default_factory=dict)
    said: str = ""
    """The end of what the launchers printed."""
    commit: str = ""

    @property
    def tried(self) -> bool:
        return not self.outcome.startswith(NOT_TRIED)


def commit() -> str:
    """The short commit of the checkout, with a + where files differ from it."""
    head = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(head, capture_output=True, text=True).stdout.strip()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="cases that run at the same time (1)")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="only every N-th case, from the K-th on")
    parser.add_argument("--results", type=Path, metavar="FILE", help="a JSON line for each case; those it has are done")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="run nothing: the table of these results")


def run_all(results: Sequence[Result], run: Callable[[Result], None], options: argparse.Namespace) -> list[Result]:
    """Run them all, and print a line for each; also those that had been run before, in what is returned."""
    part, parts = map(int, options.part.split("/"))
    now = commit()
    done = {old.name: old for old in read([options.results])} if options.results else {}
    done = {name: old for name, old in done.items() if old.commit == now}
    chosen = [result for number, result in enumerate(results) if number % parts == part - 1]

    def run_one(result: Result) -> Result:
        if result.name in done:
            return done[result.name]
        result.commit, began = now, time.monotonic()
        try:
            run(result)
        except Exception:
            result.problems.append(f"the test itself failed: {traceback.format_exc()}")
        result.seconds = result.seconds or round(time.monotonic() - began, 1)
        problems = "; ".join(result.problems).splitlines()
        print(
            f"{result.name:50} {result.outcome:9} {result.seconds:6.1f} s  {problems[0] if problems else ''}",
            flush=True,
        )
        if options.results:
            with open(options.results, "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")
        return result

    with ThreadPoolExecutor(options.at_once) as pool:
        return list(pool.map(run_one, chosen))


def read(files: Sequence[Path]) -> list[Result]:
    """The results in these files; of two with one name, the later one."""
    lines = [line for file in files if file.exists() for line in file.read_text(encoding="utf-8").splitlines()]
    found = [Result(**json.loads(line)) for line in lines]
    return list({result.name: result for result in found}.values())


def table(results: Sequence[Result]) -> str:
    """In Markdown: how each ended, and its seconds as a share of its bound; several of one place side by side."""
    columns = list(dict.fromkeys(result.column for result in results))
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for row in dict.fromkeys(result.row for result in results):
        cells = []
        for column in columns:
            here = [result for result in results if (result.row, result.column) == (row, column)]
            cells.append(
                ", ".join(
                    f"{r.outcome if not r.problems else 'FAILED'} {r.seconds / r.bound:.2f}" for r in here if r.tried
                )
            )
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def count(results: Sequence[Result]) -> tuple[int, int]:
    """Those that were as they must be, and those that were tried."""
    tried = [result for result in results if result.tried]
    return sum(not result.problems for result in tried), len(tried)
