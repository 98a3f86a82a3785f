"""Experiment C: pairs of ranks with groups of their own, whose small all-reduces take longer with each further pair.

    python benchmarks/published/c.py --json c.json       # three to ten minutes
    python benchmarks/published/c.py --quick             # one and two pairs, once

The report has 48 cores and 0.39 s for one pair, 2.07 s for eight; nobody could say why, or what to set. Measured here,
each several times in turns: the pairs, one to four (or eight); the cores, by binding; the threads; groups that nothing
uses; and the same all-reduces asynchronous, and as one call. Then `autoddp diagnose` gets the job, started both ways.
"""

from __future__ import annotations

import compileall
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import ROOT, autoddp, environment, options, say, table, verdict, write_json

JOB = Path(__file__).resolve().parent / "jobs" / "pairs.py"
PUBLISHED = {1: 0.39, 2: 0.48, 3: 0.73, 4: 0.92, 5: 1.15, 6: 1.51, 7: 1.94, 8: 2.07}
RIGHT = ("small_collectives", "oversubscribed_cores")
LIMIT = 60.0  # seconds in which a diagnosis has to answer


@dataclass(frozen=True)
class Case:
    """One way of running the job."""

    name: str
    pairs: int
    words: tuple[str, ...] = ()
    cores: int = 0
    """Cores that all ranks share; 0: all of them."""


def cases(most: int, cores: int) -> list[Case]:
    """All ways, for up to `most` pairs."""
    found = [Case(f"{pairs} pairs", pairs) for pairs in range(1, most + 1)]
    if shutil.which("taskset") and cores > 1:
        found += [Case("1 pair on one core", 1, cores=1), Case(f"{most} pairs on one core", most, cores=1)]
    found += [Case(f"{most} pairs, OMP_NUM_THREADS=1", most, ("--threads", "1"))]
    found += [Case("1 pair, 8 groups of which 7 are idle", 1, ("--groups", "8"))]
    for way in ("async", "coalesced"):
        found += [Case(f"{pairs} pairs, {way}", pairs, ("--way", way)) for pairs in sorted({1, most})]
    return found


def seconds(case: Case) -> float:
    """The job once: seconds of its 1,024 all-reduces on the slowest rank."""
    bound = ["taskset", "-c", ",".join(map(str, sorted(os.sched_getaffinity(0))[: case.cores]))] if case.cores else []
    command = [*bound, sys.executable, str(JOB), "--spawns", str(2 * case.pairs), *case.words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def diagnosed(pairs: int, spawns: bool) -> dict[str, Any]:
    """What `autoddp diagnose` says of the job, and how long that took. The loop is repeated, as a training would be."""
    ranks = 2 * pairs
    start = ["--nproc-per-node", "1" if spawns else str(ranks)]
    words = [str(JOB), "--repeats", "8", *(["--spawns", str(ranks)] if spawns else [])]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = autoddp("diagnose", "--json", *start, *words)
        done = subprocess.run(command, cwd=folder, env=environment(None), capture_output=True, text=True, timeout=400)
    took = time.monotonic() - began
    found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {"findings": [], "error": done.stderr}
    return {"seconds": took, "pairs": pairs, "spawns": spawns, "found": found}


def show(answer: dict[str, Any]) -> bool:
    """Print what one diagnosis says; whether it is right and in time."""
    first = next(iter(answer["found"]["findings"]), None)
    right = first is not None and first["cause"] in RIGHT and answer["seconds"] <= LIMIT
    how = "its own mp.spawn" if answer["spawns"] else "torchrun's way"
    print(f"\n{answer['pairs']} pairs, started {how}: {verdict(right)} after {answer['seconds']:.0f} s")
    for line in answer["found"].get("verdict", [answer["found"].get("error", "")]):
        print(f"    {line}")
    for one in answer["found"]["findings"]:
        print(f"    {one['cause']} ({one['status']}, {one['ms']:.3g} ms): {one['text']}")
    return right


def main() -> None:
    """Measure, explain, diagnose."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each way (5)")
    parser.add_argument("--pairs", type=int, default=4, help="at most (4)")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.pairs = 1, 2
    cores = len(os.sched_getaffinity(0))
    ways = cases(args.pairs, cores)
    took: dict[str, list[float]] = {case.name: [] for case in ways}
    for number in range(args.rounds):
        for case in ways if number % 2 == 0 else reversed(ways):
            took[case.name].append(seconds(case))
            say(f"{case.name}: {took[case.name][-1]:.3f} s")
    rows = []
    for case in ways:
        of_it = took[case.name]
        published = PUBLISHED.get(case.pairs, 0.0) if not case.words and not case.cores else 0.0
        spread = f"{min(of_it):.3f} to {max(of_it):.3f}"
        rows.append((case.name, f"{statistics.median(of_it):.3f}", spread, f"{published:.2f}" if published else "-"))
    table((f"1,024 all-reduces of 10×10, {cores} cores", "median s", "range", "published s"), rows)
    compileall.compile_dir(ROOT / "autoddp", quiet=1)  # as pip does; what ranks write while diagnosed vanishes
    answers = [diagnosed(args.pairs, spawns) for spawns in (False, True)]
    right = [show(answer) for answer in answers]
    figures = {"cores": cores, "seconds": took, "cases": [asdict(case) for case in ways], "diagnoses": answers}
    write_json(args.json, figures | {"right": right})
    sys.exit(not all(right))


if __name__ == "__main__":
    main()
