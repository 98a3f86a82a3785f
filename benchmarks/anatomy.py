"""Claim: the stages of a step add up to the step, on scripts of all kinds, and recording them costs next to nothing.

    python benchmarks/anatomy.py --json anatomy.json               # ten minutes
    python benchmarks/anatomy.py --only gan.py,closure.py

`autoddp diagnose --json` runs every script of tests/scripts on two ranks. For each rank the stages are added up and
compared with the step. What recording costs is the number of stamps of a step, counted in the run's trace, times what
one stamp takes, measured here in the recorder itself.

Targets: within 5 % of the step on every rank; at most 0.5 % of a step. Where a script trains nothing
that can be measured, the reason stands in the table.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from common import ROOT, autoddp, environment, options, say, table, verdict, write_json

from autoddp.timing import STAGES

SCRIPTS = ROOT / "tests" / "scripts"
SUMS, COST = 0.05, 0.005  # of a step
WORDS: dict[str, tuple[str, ...]] = {
    "plain.py": ("--steps", "2000"),
    "no_optimizer.py": ("--steps", "2000"),
    "large_batch.py": ("--steps", "2000"),
    "micro_batches.py": ("--epochs", "20"),
    "batch_norm.py": ("--steps", "2000"),
    "odd_gradients.py": ("noise",),
    "planted_failure.py": ("--kind", "raise", "--steps", "400"),
    "slow_loader.py": ("--slow", "1"),
}
"""Options of the scripts that need some, or end too soon without them."""
NO_JOBS = {"common.py"}
_STAMPS = 200_000


def stamp_seconds() -> float:
    """What one stamp takes: the least of ten measurements, since whatever else runs can only add to it."""
    from autoddp.worker.observe.stages import Stages

    def once() -> float:
        stages = Stages()
        stages.on = True
        began = time.perf_counter()
        for _ in range(_STAMPS // 10):
            stages.enter("forward")
        return (time.perf_counter() - began) / (_STAMPS // 10)

    return min(once() for _ in range(10))


def stamps_of_a_step(folder: Path) -> float:
    """Slices of stages in the run's trace, for each step of each rank."""
    (path,) = folder.glob(".autoddp/2*/trace.json")
    found = Counter(event.get("cat") for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X")
    return found["stages"] / found["steps"]


def diagnosed(script: str, budget: str) -> tuple[dict[str, Any], float]:
    """What `autoddp diagnose --json` says of a script, and stamps of a step. A ValueError says why it says nothing."""
    with tempfile.TemporaryDirectory(prefix="anatomy-") as name:
        more = {"TUNED_TIMES_LONGER": "20", "OUT": name, "SHARED": name}
        (Path(name) / "state.txt").write_text("0\n")  # some scripts read these
        words = [*autoddp("diagnose"), "--json", "--nproc-per-node", "2", "--diagnose-budget", budget]
        words += [str(SCRIPTS / script), *WORDS.get(script, ())]
        run = subprocess.run(
            words, cwd=name, env={**environment(), **more}, capture_output=True, text=True, timeout=300
        )
        try:
            found = json.loads(run.stdout)
        except ValueError:
            raise ValueError(run.stderr.strip().splitlines()[-1]) from None
        if found["step_ms"] is None:
            raise ValueError(re.sub(r"^everything: ", "", found["not_measured"][0]))
        with contextlib.suppress(ValueError):
            return found, stamps_of_a_step(Path(name))
        return found, 0.0


def main() -> None:
    """Diagnose all scripts and print the table."""
    parser = options(__doc__)
    parser.add_argument("--only", metavar="SCRIPT,…", help="these scripts (all)")
    parser.add_argument("--budget", default="4s", help="of each diagnosis (4s)")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else sorted(path.name for path in SCRIPTS.glob("*.py"))
    one = stamp_seconds()
    rows, measured = [], []
    for script in wanted:
        if script in NO_JOBS:
            continue
        try:
            found, stamps = diagnosed(script, args.budget)
        except ValueError as why:
            rows.append((script, "", "", "", "", str(why)[:100]))
            continue
        sums = [sum(rank[f"{stage}_ms"] for stage in STAGES) / rank["step_ms"] for rank in found["ranks"]]
        off = max(abs(share - 1) for share in sums)
        cost = stamps * one * 1e3 / found["step_ms"]
        measured.append({"script": script, "step_ms": found["step_ms"], "off": off, "stamps": stamps, "cost": cost})
        share = f"{cost:.2%}" if stamps else "not counted"
        rows.append(
            (
                script,
                f"{found['step_ms']:.1f}",
                f"{off:.2%}",
                f"{stamps:.0f}",
                share,
                verdict(off <= SUMS and cost <= COST),
            )
        )
        say(f"{script}: {off:.2%} off, {cost:.2%} of a step")
        if args.quick and len(measured) == 3:
            break
    table(("script", "step ms", "stages off by", "stamps", "they take", "reached"), rows)
    print(f"one stamp takes {one * 1e6:.2f} µs; {len(measured)} scripts were measured")
    write_json(args.json, {"stamp_seconds": one, "scripts": measured, "python": sys.version})


if __name__ == "__main__":
    main()
