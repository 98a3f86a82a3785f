"""Every script of `scripts/`: by torchrun, tuned by autoddp, and launched by autoddp, as a table.

    python campaigns/compat/run_all.py
    python campaigns/compat/run_all.py --only datasets_map,timm_loop
    python campaigns/compat/run_all.py --json compat.json --page docs/compatibility.md

A row is bad if the script was not tuned although it should be (or the other way round), if tuning has changed a file,
or if the real job differs from torchrun's in its exit code, its parameters or the names of its files. The outputs of
the runs of a bad row are kept, and the exit code is 1. With --only, the other rows of the file of --json stay.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

sys.path[:1] = [str(Path(__file__).resolve().parents[2] / name) for name in ("campaigns", "tests")]

import torch  # noqa: E402

from compat import page  # noqa: E402
from compat.beside_torchrun import Result, run  # noqa: E402
from compat.case import Case, load  # noqa: E402


def main() -> int:
    args = _arguments()
    cases = load()
    chosen = _chosen(cases, args.only)
    began = time.monotonic()
    results = _read(args.json) if args.json and args.only else {}
    found: dict[str, Result] = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        for done in as_completed([pool.submit(run, one) for one in chosen]):
            result = done.result()
            found[result.name] = results[result.name] = result
            if args.json:  # after each row: a run that is cut off keeps what it has
                Path(args.json).write_text(json.dumps({name: asdict(one) for name, one in results.items()}, indent=1))
    for name in sorted(found):
        _print(cases[name], found[name])
    bad = sum(one.is_bad for one in found.values())
    skipped = sum(bool(one.skipped) for one in found.values())
    print(f"{len(found)} scripts, {bad} bad, {skipped} skipped, {time.monotonic() - began:.0f} s")
    if args.page:
        results = {name: one for name, one in results.items() if name in cases}
        if absent := sorted(cases.keys() - results.keys()):
            sys.exit(f"no page: {', '.join(absent)} were not run; run all, or name the --json file of earlier runs")
        Path(args.page).write_text(_page(cases, results))
    return 1 if bad else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of scripts, with commas between")
    parser.add_argument("--jobs", type=int, default=1, help="scripts at the same time")
    parser.add_argument("--json", metavar="FILE", help="results, for programs")
    parser.add_argument("--page", metavar="FILE", help="results, for people: docs/compatibility.md")
    return parser.parse_args()


def _chosen(cases: Mapping[str, Case], only: str) -> list[Case]:
    words = {word for word in only.split(",") if word}
    if unknown := words - cases.keys():
        sys.exit(f"no such script: {', '.join(sorted(unknown))}")
    return [one for one in cases.values() if not words or one.name in words]


def _read(path: str) -> dict[str, Result]:
    if not Path(path).exists():
        return {}
    return {name: Result(**one) for name, one in json.loads(Path(path).read_text()).items()}


def _print(case: Case, one: Result) -> None:
    row = _row(case, one)
    print(f"{row.title}\n    tuned: {row.tuned}\n    parameters: {row.parameters}; cost: {row.cost}")
    for problem in one.problems:
        print(f"    BAD: {problem}")
    if one.kept:
        print(f"    the outputs are in {one.kept}")


def _row(case: Case, one: Result) -> page.Row:
    if one.skipped:
        return page.Row(case.name, case.title, f"not run here: {one.skipped}", "not compared", "nothing", case.note)
    settings = (
        f"no gain was certain; run 3 with {one.settings}" if one.by_hand else one.settings or "your settings stay"
    )
    tuned = f"yes: {settings}" if one.tuned else f"no: {_for_page(one.why)}"
    starts = f"{one.starts} start{'s' if one.starts != 1 else ''}"
    cost = f"{starts}, {one.seconds:.0f} s, {one.trials} trials" if one.tuned else f"{starts}, {one.seconds:.0f} s"
    if one.is_bad:
        tuned += f"; BAD: {one.problems[0]}"
    return page.Row(case.name, case.title, tuned, one.parameters, cost, case.note)


def _for_page(why: str) -> str:
    """Without the name of a run's folder and the words that the column says already."""
    return re.sub(r"; see \S+$", "", why).removeprefix("warning: not tuned, launching as written: ")


def _page(cases: Mapping[str, Case], results: Mapping[str, Result]) -> str:
    dates = sorted({one.when for one in results.values()})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    names = sorted({module for case in cases.values() for module in case.modules})
    packages = metadata.packages_distributions()
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    versions += [f"{name} {metadata.version(packages[name][0])}" for name in names if name in packages]
    return page.render([_row(cases[name], one) for name, one in results.items()], when, ", ".join(versions))


if __name__ == "__main__":
    sys.exit(main())
