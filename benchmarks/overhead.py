"""Claim: a recipe costs nothing: steps are as fast as with its settings in the script, launches as fast as torchrun's.

    python benchmarks/overhead.py --json overhead.json                # on a quiet machine: about a quarter of an hour

steps   jobs/mlp.py on two local ranks: `autoddp --recipe` (16 MiB buckets, bucket view, bf16 on the wire) on the script
        as it is, against torchrun on the script with the same settings as its own options; whole jobs alternate
        (AB BA …). Target: the interval's upper end is within 1 %; the table says so where only its middle is.
launch  jobs/noop.py under torchrun, `autoddp --trials 0` and `autoddp --recipe`, in alternation. Target: within 5 %.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from common import MLP, NOOP, Local, autoddp, gain, median, options, paired, table, torchrun, write_json

from autoddp.knobs import Configuration
from autoddp.recipe import load, save
from autoddp.timing import Speedup

SETTINGS = Configuration({"bucket_cap_mb": 16.0, "gradient_as_bucket_view": True, "hook": "bf16"})
BY_HAND = ["--bucket-cap-mb", "16", "--bucket-view", "--bf16"]
TWO = ["--nproc-per-node", "2"]
STEP, LAUNCH = 0.01, 0.05  # how much slower it may be


def make_recipe(local: Local) -> str:
    """A recipe for this job from a real study, with its settings replaced by those of this benchmark."""
    local.run([*autoddp(*TWO, "--trials", "1", "--tune-only", "--recipe", "found.toml"), MLP, "--steps", "1000000"])
    home = local.home(0)
    save(replace(load(home / "found.toml"), configuration=SETTINGS), home / "recipe.toml")
    return "recipe.toml"


def steps(local: Local, recipe: str, args: Namespace) -> dict[str, list[float]]:
    """Seconds per step of whole jobs."""
    count = ["--steps", str(args.warmup + args.steps)]
    ours = [*autoddp(*TWO, "--recipe", recipe), MLP, *count]
    theirs = [*torchrun(*TWO), MLP, *count, *BY_HAND]
    sides = {
        "by hand": lambda: local.step_seconds(theirs, args.warmup),
        "recipe": lambda: local.step_seconds(ours, args.warmup),
    }
    return paired(sides, args.pairs)


def launches(local: Local, recipe: str, args: Namespace) -> dict[str, list[float]]:
    """Wall seconds of a job that does nothing."""
    sides = {
        "torchrun": lambda: local.run([*torchrun(*TWO), NOOP]),
        "trials 0": lambda: local.run([*autoddp(*TWO, "--trials", "0"), NOOP]),
        "recipe": lambda: local.run([*autoddp(*TWO, "--recipe", recipe), NOOP]),
    }
    paired(sides, 1)  # for the file cache
    return paired(sides, args.launches)


def within(slower: Speedup, limit: float) -> str:
    """Whether a ratio of times stays under 1 + `limit`; a ratio of 1.0 is the same time."""
    if slower.high <= 1 + limit:
        return "yes"
    return (
        "NO" if slower.low > 1 + limit else "yes, by its middle" if slower.ratio <= 1 + limit else "no, by its middle"
    )


def row(what: str, before: list[float], after: list[float], limit: float) -> tuple[str, ...]:
    """One comparison."""
    times = f"{median(before) * 1e3:.2f} → {median(after) * 1e3:.2f} ms"
    slower = gain(after, before)
    share = f"{slower.ratio - 1:+.2%} ({slower.low - 1:+.2%} to {slower.high - 1:+.2%})"
    return what, times, share, f"≤ {limit:.0%}", within(slower, limit)


def main() -> None:
    """Run both comparisons, print them and write the figures."""
    parser = options(__doc__)
    parser.add_argument("--pairs", type=int, default=20, help="of jobs for the step time (20)")
    parser.add_argument("--steps", type=int, default=120, help="timed in each job (120)")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--launches", type=int, default=20, help="of each launcher for the no-op (20)")
    args = parser.parse_args()
    if args.quick:
        args.pairs, args.steps, args.launches = 2, 20, 2
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        local = Local(Path(folder))
        recipe = make_recipe(local)
        stepping = steps(local, recipe, args)
        launching = launches(local, recipe, args)
    base = launching["torchrun"]
    rows = [
        row("step, by hand → recipe", stepping["by hand"], stepping["recipe"], STEP),
        row("launch, torchrun → autoddp --trials 0", base, launching["trials 0"], LAUNCH),
        row("launch, torchrun → autoddp --recipe", base, launching["recipe"], LAUNCH),
    ]
    table(("what", "median", "slower by (99 %)", "target", "reached"), rows)
    write_json(args.json, {"settings": SETTINGS.plain(), "steps": stepping, "launches": launching})


if __name__ == "__main__":
    main()
