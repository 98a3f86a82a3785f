"""Claim: every rung gains on a slow link, by the factors and errors shown; on a fast link compression is not launched.

    python benchmarks/ladder.py --json ladder.json          # as root, on a quiet machine: about ten minutes

slow    Two hosts (network namespaces) on 200 Mbit/s, jobs/mlp.py, `--allow exact --accumulate-up-to 4 --trials 20`:
        the ladder with all rungs, each with its gradient error. Then three whole jobs alternate: the launched one
        (four of the script's steps in one), torchrun, and the same loop written by hand, in seconds per sample.
        Target: 3 times as fast.
fast    Two ranks on one host, over loopback, `--allow lossy`, for every seed: near and lossy must not be launched.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from common import (
    MLP,
    Hosts,
    Lab,
    Local,
    autoddp,
    gain,
    median,
    options,
    paired,
    say,
    table,
    torchrun,
    verdict,
    write_json,
)

from autoddp.recipe import load

TARGET = 3.0
AT_ONCE = 4
ENDLESS = ["--steps", "1000000"]  # the study ends the job


def slow(folder: Path, args: Namespace) -> dict[str, Any]:
    """The ladder, and seconds per sample of whole jobs."""
    with Lab(2, "200mbit") as lab:
        hosts = Hosts(folder, lab)
        own = ["--trials", str(args.trials), "--allow", "exact", "--accumulate-up-to", str(AT_ONCE), "--tune-only"]
        hosts.run([*autoddp(*own, "--recipe", "found.toml"), MLP, *ENDLESS])
        chosen = load(hosts.home(0) / "found.toml").configuration
        say(f"launches {chosen}")
        # The first twenty steps whose gradients are kept are checked, which takes time (see worker/gradients/).
        warmup, steps = 8 * AT_ONCE, AT_ONCE * args.groups
        job = [MLP, "--steps", str(warmup + steps)]
        large = [MLP, "--micro-batches", str(AT_ONCE), "--no-sync", "--steps", str(1 + args.groups)]
        recipe = autoddp("--recipe", "found.toml")
        sides = {
            "torchrun": lambda: hosts.step_seconds([*torchrun(), *job], warmup, AT_ONCE),
            "by hand": lambda: hosts.step_seconds([*torchrun(), *large], 1) / AT_ONCE,
            "autoddp": lambda: hosts.step_seconds([*recipe, *job], warmup, AT_ONCE),
        }
        seconds = paired(sides, args.rounds)
        return {"summary": hosts.summary(), "configuration": chosen.plain(), "seconds": seconds}


def fast(folder: Path, args: Namespace) -> list[dict[str, Any]]:
    """Run one study for each seed."""
    found = []
    for seed in range(args.seeds):
        here = Local(folder / f"seed{seed}")
        own = ["--nproc-per-node", "2", "--trials", str(args.trials), "--allow", "lossy", "--tune-only"]
        try:
            here.run([*autoddp(*own, "--seed", str(seed)), MLP, *ENDLESS])
        except RuntimeError as error:  # the script stays as written, and the next start would tune again
            if "no recipe was written: undecided: " not in str(error):
                raise
        found.append(here.summary())
        say(f"loopback, seed {seed}: launches {found[-1]['decision']['configuration'] or 'as written'}")
    return found


def rungs(name: str, summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """A table row for each rung of a ladder."""
    rows: list[tuple[str, ...]] = []
    for entry in summary["ladder"]:
        gained = entry["speedup"]
        error = entry["error"]
        relative = "" if error is None else f"{error['relative']:.2%} a step, {error['of_sum']:.2%} of a sum"
        ratio = f"×{gained['ratio']:.3g} ({gained['low']:.3g} to {gained['high']:.3g})"
        rows.append((name, entry["rung"], ratio, relative, str(entry["configuration"])))
    return rows


def show(found: dict[str, Any], studies: list[dict[str, Any]]) -> None:
    """Print the ladders, then what was launched."""
    rows = rungs("200 Mbit/s", found["summary"])
    for number, study in enumerate(studies):
        rows += rungs(f"loopback, seed {number}", study)
    table(("link", "rung", "speed-up", "gradient error", "configuration"), rows)
    launched: list[tuple[object, ...]] = []
    base = found["seconds"]["torchrun"]
    for side, target in (("autoddp", TARGET), ("by hand", None)):
        ratio = gain(base, found["seconds"][side])
        times = f"{median(base) * 1e3:.0f} → {median(found['seconds'][side]) * 1e3:.0f} ms"
        reached = verdict(ratio.ratio >= target) if target else ""
        launched.append((side, times, ratio, f"≥ {target:g}" if target else "", reached))
    table(("200 Mbit/s", "ms per sample batch, torchrun → side", "speed-up", "target", "reached"), launched)
    hooks = [study["decision"]["configuration"].get("hook") for study in studies]
    print(f"on loopback no hook is launched: {verdict(not any(hooks))}")


def main() -> None:
    """Measure both links, then print the tables."""
    parser = options(__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3, help="studies on loopback (3)")
    parser.add_argument("--rounds", type=int, default=4, help="of whole jobs, each side once (4)")
    parser.add_argument("--groups", type=int, default=4, help="of four steps, timed in each job (4)")
    args = parser.parse_args()
    if args.quick:
        args.trials, args.seeds, args.rounds, args.groups = 5, 1, 1, 1
    with tempfile.TemporaryDirectory(prefix="ladder-") as folder:
        found = slow(Path(folder, "slow"), args)
        studies = fast(Path(folder, "fast"), args)
    show(found, studies)
    write_json(args.json, {"slow": found, "fast": studies})


if __name__ == "__main__":
    main()
