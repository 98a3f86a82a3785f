"""Claim: where nothing can be won, autoddp loses nothing: what it launches is not slower than the script as written.

    python benchmarks/never_slower.py --json never_slower.json        # on a quiet machine: about 25 minutes

Two local ranks run two jobs with ten seeds each: a tiny model, and a script whose own settings are good already (one
big bucket with the gradients as views of it). Each seed is tuned afresh (20 trials). Then the job under its recipe and
the job under torchrun alternate (AB BA …). A seed counts as slower if the whole interval of its speed-up lies below 1;
a job counts as slower if that holds over all its seeds. The lower end of this last interval says how small a loss the
benchmark could have shown.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from common import MLP, Local, autoddp, gain, options, paired, say, table, torchrun, verdict, write_json

from autoddp.knobs import Configuration
from autoddp.timing import Speedup

TWO = ["--nproc-per-node", "2"]
JOBS = {
    "tiny model": ["--width", "32", "--depth", "3", "--batch", "8"],
    "one big bucket": ["--bucket-cap-mb", "100", "--bucket-view"],
}
STEPS = {"tiny model": (200, 2000), "one big bucket": (10, 60)}  # warm-up, timed


def tuned(local: Local, name: str, seed: int, trials: int) -> dict[str, Any]:
    """Run one study; its recipe is <seed>.toml."""
    own = ["--trials", str(trials), "--tune-only", "--seed", str(seed), "--recipe", f"{seed}.toml"]
    local.run([*autoddp(*TWO, *own), MLP, *JOBS[name], "--steps", "1000000"])
    return local.summary()


def one_seed(local: Local, name: str, seed: int, args: Namespace) -> dict[str, Any]:
    """Tune, then measure both launches in alternation."""
    summary = tuned(local, name, seed, args.trials)
    chosen = str(Configuration(summary["decision"]["configuration"]))
    say(f"{name}, seed {seed}: headroom {summary['headroom']['share']:.0%}, launches {chosen}")
    warmup, steps = STEPS[name]
    job = [MLP, *JOBS[name], "--steps", str(warmup + steps)]
    sides = {
        "torchrun": lambda: local.step_seconds([*torchrun(*TWO), *job], warmup),
        "launched": lambda: local.step_seconds([*autoddp(*TWO, "--recipe", f"{seed}.toml"), *job], warmup),
    }
    return {"seed": seed, "headroom": summary["headroom"]["share"], "chosen": chosen, **paired(sides, args.pairs)}


def slower(found: Speedup) -> bool:
    """Whether the whole interval of the speed-up lies below 1."""
    return found.high < 1.0


def over_all(seeds: list[dict[str, Any]]) -> Speedup:
    """The speed-up over all pairs of a job."""
    return gain(
        [second for seed in seeds for second in seed["torchrun"]],
        [second for seed in seeds for second in seed["launched"]],
    )


def show(results: dict[str, list[dict[str, Any]]]) -> None:
    """Print a row for each seed and one for each job."""
    rows = []
    for name, seeds in results.items():
        for seed in seeds:
            found = gain(seed["torchrun"], seed["launched"])
            one = (
                name,
                str(seed["seed"]),
                f"{seed['headroom']:.0%}",
                seed["chosen"],
                found,
                verdict(not slower(found)),
            )
            rows.append(one)
        whole = over_all(seeds)
        rows.append((name, "all", "", "", whole, verdict(not slower(whole))))
    table(("job", "seed", "headroom", "launched", "against torchrun", "not slower"), rows)


def main() -> None:
    """Run all jobs, print the table and write the figures."""
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=4, help="of whole jobs for each seed (4)")
    parser.add_argument("--trials", type=int, default=20)
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.pairs, args.trials = 1, 2, 6
    results = {}
    with tempfile.TemporaryDirectory(prefix="never-slower-") as folder:
        for name in JOBS:
            local = Local(Path(folder) / name.replace(" ", "-"))
            results[name] = [one_seed(local, name, seed, args) for seed in range(args.seeds)]
    show(results)
    write_json(args.json, {"results": results})


if __name__ == "__main__":
    main()
