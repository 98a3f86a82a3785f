"""Claim: if OMP_NUM_THREADS is unset, autoddp finds a number of threads with which the launched job is faster.

    python benchmarks/threads.py --json threads.json                  # as root, on a quiet machine: about five minutes

Two hosts (network namespaces) with one rank each share this machine's cores, as containers of one machine do, and
OMP_NUM_THREADS is unset. torchrun leaves it unset for one rank a host, so each rank takes all cores that it sees. On
jobs/mlp.py: `autoddp --trials 20 --tune-only`, then whole jobs in alternation (AB BA …), its recipe against torchrun.
Target: 1.2 times as fast. Then the same with OMP_NUM_THREADS set by the user: autoddp must not change it.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from common import MLP, Hosts, Lab, autoddp, gain, median, options, paired, say, table, torchrun, verdict, write_json

from autoddp.recipe import load

TARGET = 1.2
JOB = ["--width", "512", "--batch", "128"]
ENDLESS = ["--steps", "1000000"]  # the study ends the job


def tune(hosts: Hosts, args: Namespace, recipe: str) -> dict[str, Any]:
    """The study's summary."""
    trials = ["--trials", str(args.trials), "--tune-only", "--recipe", recipe]
    hosts.run([*autoddp(*trials), MLP, *JOB, *ENDLESS])
    return hosts.summary()


def compared(hosts: Hosts, recipe: str, args: Namespace) -> dict[str, list[float]]:
    """Seconds per step of whole jobs."""
    count = ["--steps", str(args.steps + args.warmup)]
    sides = {
        "torchrun": lambda: hosts.step_seconds([*torchrun(), MLP, *JOB, *count], args.warmup),
        "autoddp": lambda: hosts.step_seconds([*autoddp("--recipe", recipe), MLP, *JOB, *count], args.warmup),
    }
    return paired(sides, args.rounds)


def main() -> None:
    """Tune, compare, pin, show."""
    parser = options(__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=8, help="of whole jobs, each side once (8)")
    parser.add_argument("--steps", type=int, default=150, help="timed in each job (150)")
    parser.add_argument("--warmup", type=int, default=10)
    args = parser.parse_args()
    if args.quick:
        args.trials, args.rounds, args.steps = 4, 2, 20
    with tempfile.TemporaryDirectory(prefix="threads-") as folder, Lab(2, None) as lab:
        hosts = Hosts(Path(folder), lab)
        hosts.threads = None
        study = tune(hosts, args, "found.toml")
        recipe = load(hosts.home(0) / "found.toml")
        say(f"counts tried: {study['job']['thread_counts']}; the recipe sets {recipe.env or 'nothing'}")
        seconds = compared(hosts, "found.toml", args)
        hosts.threads = "2"
        pinned = tune(hosts, args, "pinned.toml")["job"]["left_out"].get("threads", "no")
    speedup = gain(seconds["torchrun"], seconds["autoddp"])
    times = f"{median(seconds['torchrun']) * 1e3:.1f} → {median(seconds['autoddp']) * 1e3:.1f} ms"
    rows = [
        (str(recipe.env or "nothing"), times, str(speedup), f"≥ {TARGET}", verdict(speedup.ratio >= TARGET), pinned)
    ]
    table(("sets", "ms per step, torchrun → autoddp", "speed-up", "target", "reached", "pinned when set"), rows)
    write_json(args.json, {"study": study, "seconds": seconds, "env": recipe.env, "pinned": pinned})


if __name__ == "__main__":
    main()
