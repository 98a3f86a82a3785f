"""Claim: where page faults take much of a step on a CPU, autoddp finds it, and makes the job faster by keeping memory.

    python benchmarks/malloc.py --json malloc.json                  # on a quiet machine: about twelve minutes

glibc returns much of what a step frees to the system, and gets it anew in the next step, page by page. On two ranks of
jobs/shapes.py with real computing: `autoddp --trials 12 --tune-only` without hooks, then whole jobs in alternation
(AB BA …), its recipe against torchrun. A model whose page faults take less than a tenth of a step is not offered the
setting: the table says so. Target: where it is launched, surely faster.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from common import JOBS, Local, autoddp, gain, median, options, paired, say, table, torchrun, verdict, write_json

from autoddp.recipe import load

SHAPES = str(JOBS / "shapes.py")
CASES = {"mlp": ("mlp", 16), "conv": ("conv", 64), "large conv": ("conv", 256), "transformer": ("transformer", 16)}
"""Name → the model, and times as large as its smallest batch: activations of some MiB."""
ENDLESS = ["--steps", "1000000"]  # the study ends the job
RANKS = ["--nproc-per-node", "2"]


def job(name: str) -> list[str]:
    """The script and its options."""
    model, times = CASES[name]
    return [SHAPES, "--model", model, "--batch-times", str(times)]


def measured(name: str, here: Local, args: Namespace) -> dict[str, Any]:
    """What the study launches, and seconds per step of whole jobs on both sides."""
    recipe = f"{name.replace(' ', '-')}.toml"
    asked = ["--trials", str(args.trials), "--allow", "exact", "--tune-only", "--recipe", recipe]
    here.run([*autoddp(*RANKS, *asked), *job(name), *ENDLESS], timeout=600)
    study, launched = here.summary(), load(here.home(0) / recipe)
    count = ["--steps", str(args.steps + args.warmup)]
    sides = {
        "torchrun": lambda: here.step_seconds([*torchrun(*RANKS), *job(name), *count], args.warmup),
        "autoddp": lambda: here.step_seconds([*autoddp("--recipe", recipe, *RANKS), *job(name), *count], args.warmup),
    }
    return {"offered": study["job"]["start_settings"], "env": launched.env, "seconds": paired(sides, args.rounds)}


def main() -> None:
    """Tune, compare, show."""
    parser = options(__doc__)
    parser.add_argument("--jobs", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=4, help="of whole jobs, each side once (4)")
    parser.add_argument("--steps", type=int, default=60, help="timed in each job (60)")
    parser.add_argument("--warmup", type=int, default=10)
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.steps = 2, 20
    found = {}
    with tempfile.TemporaryDirectory(prefix="malloc-") as folder:
        for name in args.jobs:
            say(name)
            found[name] = measured(name, Local(Path(folder) / name.replace(" ", "-")), args)
    rows = []
    for name, of_job in found.items():
        seconds = of_job["seconds"]
        speedup = gain(seconds["torchrun"], seconds["autoddp"])
        keeps = "GLIBC_TUNABLES" in of_job["env"]
        offered = any("malloc" in setting for setting in of_job["offered"])
        what = "launched" if keeps else "tried" if offered else "not offered"
        times = f"{median(seconds['torchrun']) * 1e3:.1f} → {median(seconds['autoddp']) * 1e3:.1f}"
        rows.append((name, what, times, str(speedup), verdict(speedup.sure and speedup.ratio > 1) if keeps else ""))
    table(("job", "keeping memory", "ms per step, torchrun → autoddp", "speed-up", "surely faster"), rows)
    write_json(args.json, {"jobs": found})


if __name__ == "__main__":
    main()
