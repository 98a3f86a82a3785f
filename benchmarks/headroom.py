"""Claim: the headroom is the share of a step that is saved if reducing takes no time, however much ranks differ.

    python benchmarks/headroom.py --json headroom.json                # on a quiet machine: about fifteen minutes

Two gloo ranks with one small layer, and their reduction, sleep for the times that the case says. The truth is the time
that the reductions of the same run took after the last rank was ready; on a busy machine that is more than planted. The
worker's runner and the study measure the headroom as they do in a tuning job.

Target: within 5 points of the truth in every run. If ranks are slow at random, some thirty steps are too few for that,
and the truth must lie in the interval.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, environment, options, say, table, verdict, write_json

sys.path[:0] = [str(ROOT / "tests" / "worker")]

from headroom_checks import PLANTED  # noqa: E402
from launchers import free_port  # noqa: E402

PROGRAM = ROOT / "tests" / "worker" / "headroom_checks.py"
NEAR = 0.05
AT_RANDOM = "stragglers at random"


def measured(name: str, runs: int) -> list[list[float]]:
    """Measure each run of a case: the share, its interval and the truth."""
    of_job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with tempfile.TemporaryDirectory(prefix="headroom-") as folder:
        words = [sys.executable, str(PROGRAM), folder, "wall", f"{name}={runs}"]
        ranks = [subprocess.Popen(words, env={**environment(), **of_job, "RANK": str(rank)}) for rank in range(2)]
        for rank in ranks:
            rank.wait()
        found: list[list[float]] = json.loads((Path(folder) / f"{name}.json").read_text())
    return found


def row(name: str, found: list[list[float]]) -> tuple[Any, ...]:
    """Of the table."""
    errors = sorted(share - truth for share, _, _, truth in found)
    truths = sorted(truth for _, _, _, truth in found)
    near = sum(abs(error) <= NEAR for error in errors)
    inside = sum(low - 0.01 <= truth <= high + 0.01 for _, low, high, truth in found)
    reached = inside >= 0.95 * len(found) if name == AT_RANDOM else near == len(found)
    runs = len(found)
    return (
        name,
        f"{PLANTED[name].truth:.1%}",
        f"{truths[0]:.1%} to {truths[-1]:.1%}",
        f"{100 * errors[0]:+.1f} to {100 * errors[-1]:+.1f}",
        f"{near}/{runs}",
        f"{inside}/{runs}",
        verdict(reached),
    )


def main() -> None:
    """Measure all cases and print them."""
    parser = options(__doc__)
    parser.add_argument("--runs", type=int, default=20, help="of each case (20)")
    parser.add_argument("cases", nargs="*", default=list(PLANTED), metavar="CASE", help="all, unless some are named")
    args = parser.parse_args()
    found = {}
    for name in args.cases:
        found[name] = measured(name, 2 if args.quick else args.runs)
        say(f"{name}: {' '.join(f'{share:.1%} ({truth:.1%})' for share, _, _, truth in found[name])}")
    head = ("case", "planted", "truth", "points off", "within 5", "truth in the interval", "reached")
    table(head, [row(name, of_runs) for name, of_runs in found.items()])
    write_json(args.json, {"found": found})


if __name__ == "__main__":
    main()
