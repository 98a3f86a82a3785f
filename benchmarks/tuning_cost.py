"""Claim: twenty live trials cost little more than the steps they time, and far less than a process start for each.

    python benchmarks/tuning_cost.py --json tuning_cost.json          # as root, on a quiet machine: about 20 minutes
    python benchmarks/tuning_cost.py --parts slow --seeds 2           # a part of it

live      `autoddp --trials 20 --all-trials` on recipes/digits with two local ranks: wall time by start-up, timed steps,
          warm-up steps, changes of configuration ("turns"), and the rest. Target: the rest is at most 10 %.
starts    the same number of trials, each with a start of the process. Measured: the start of that script under
          torchrun, as wall time minus the training time that it reports itself; the median of several. Extrapolated:
          20 such starts, and all steps of the study, final rounds included, with the time that they took there. Target:
          at least 8 times the whole wall time of the live run.
slow link two hosts at 200 Mbit/s, jobs/mlp.py, `--trials 20 --allow lossy`, for each seed: the decision comes within
          45 of the baseline's steps (median), beside start-up; within 60 where the job is diagnosed as well.
"""

from __future__ import annotations

import re
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from common import MLP, ROOT, Hosts, Lab, Local, autoddp, median, options, say, table, torchrun, verdict, write_json

DIGITS = str(ROOT / "recipes" / "digits" / "train.py")
# One backward pass a step, and long enough for a study: a script that ends in the middle is started again.
AS_BATCHES = "--accumulate 1 --batch-size 16"
LASTING = "--epochs 400"
STEPS_PER_EPOCH = 45  # 1,437 images over 2 ranks in batches of 16
TWO = ["--nproc-per-node", "2"]
REST, STARTS = 0.10, 8.0
SLOW = {"without a diagnosis": 45, "with a diagnosis": 60}
PARTS = ("start-up", "measured", "warm-up", "turns")


def study(local: Local, trials: int, *words: str) -> dict[str, Any]:
    """Run one study and return its cost."""
    wall = local.run([*autoddp(*words[:-1], "--trials", str(trials), "--tune-only"), *words[-1].split()])
    summary = local.summary()
    seconds = summary["wall_seconds"]
    parts = {name: seconds[name] for name in PARTS}
    parts["rest"] = seconds["total"] - sum(parts.values())
    return {
        "trials": len(summary["trials"]),
        "parts": parts,
        "total": seconds["total"],
        "command": wall,
        "steps": summary["steps"],
        "baseline": summary["baseline"]["seconds"],
    }


def start_seconds(local: Local, repeats: int) -> list[float]:
    """Wall seconds of torchrun on the digits for one epoch, without the epoch's own time."""
    found: list[float] = []
    while len(found) < repeats:
        try:
            wall = local.run([*torchrun(*TWO), DIGITS, *AS_BATCHES.split(), "--epochs", "1"])
        except RuntimeError as error:
            if "terminate called without an active exception" not in str(error):
                raise
            say("torch aborted while the interpreter ended, as 2.13 now and then does: this start is made again")
            continue
        log = max(local.folder.glob("run*.log"), key=lambda path: path.stat().st_mtime).read_text()
        per_step = re.search(r"([\d.]+) ms per step", log)
        assert per_step is not None, log
        found.append(wall - STEPS_PER_EPOCH * float(per_step[1]) / 1e3)
        say(f"a start of the digits job: {found[-1]:.2f} s")
    return found


def digits(folder: Path, args: Namespace) -> dict[str, Any]:
    """Compare live trials with process starts, in alternation."""
    local = Local(folder)
    live, starts = [], []
    for number in range(args.rounds):
        own = [*TWO, "--all-trials", "--recipe", f"{number}.toml"]
        live.append(study(local, args.trials, *own, f"{DIGITS} {AS_BATCHES} {LASTING}"))
        say(f"{args.trials} live trials: {live[-1]['total']:.1f} s, the command {live[-1]['command']:.1f} s")
        starts += start_seconds(local, args.starts)
    live.sort(key=lambda cost: cost["command"])
    typical = live[(len(live) - 1) // 2]
    stepping = typical["parts"]["measured"] + typical["parts"]["warm-up"]
    apart = args.trials * median(starts) + stepping
    return {"live": live, "typical": typical, "starts": starts, "apart": apart, "ratio": apart / typical["command"]}


def slow_link(folder: Path, args: Namespace) -> dict[str, list[dict[str, Any]]]:
    """Studies of all rungs at 200 Mbit/s, one for each seed, without and with a diagnosis."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SLOW}
    with Lab(2, "200mbit") as lab:
        hosts = Hosts(folder, lab)
        for seed in range(args.seeds):
            for name in SLOW:
                own = ["--allow", "lossy", "--budget", "10m", "--seed", str(seed), "--recipe", f"{seed} {name}.toml"]
                own += ["--diagnose-budget", "0"] if name == "without a diagnosis" else []
                cost = study(hosts, args.trials, *own, f"{MLP} --steps 1000000")
                cost["in_steps"] = (cost["total"] - cost["parts"]["start-up"]) / cost["baseline"]
                found[name].append(cost)
                rounds = len(hosts.summary()["finals"]["baseline_rounds"])
                say(f"seed {seed}, {name}: {cost['in_steps']:.1f} steps, {cost['trials']} trials, {rounds} rounds")
    return found


def show_costs(costs: dict[str, dict[str, Any]]) -> None:
    """Print where the time went."""
    rows = []
    for name, cost in costs.items():
        parts = [f"{seconds:.1f} s ({seconds / cost['total']:.0%})" for seconds in cost["parts"].values()]
        rows.append((name, str(cost["trials"]), *parts, f"{cost['total']:.1f} s"))
    table(("study", "trials", *PARTS, "rest", "total"), rows)


def show_slow(slow: dict[str, list[dict[str, Any]]]) -> None:
    """Print the steps of the studies at 200 Mbit/s."""
    rows = []
    for name, costs in slow.items():
        steps = [cost["in_steps"] for cost in costs]
        figure = f"{median(steps):.0f} steps ({min(steps):.0f} to {max(steps):.0f}, n={len(steps)})"
        rows.append((f"200 Mbit/s, {name}", figure, f"≤ {SLOW[name]}", verdict(median(steps) <= SLOW[name])))
    table(("claim", "from start-up to the decision", "target", "reached"), rows)


def show_starts(local: dict[str, Any]) -> None:
    """Print what live trials cost beside process starts."""
    typical, starts = local["typical"], local["starts"]
    rest = typical["parts"]["rest"] / typical["total"]
    again = f"start {median(starts):.2f} s ({min(starts):.2f} to {max(starts):.2f}, n={len(starts)}), "
    again += f"× {typical['trials']} + steps = {local['apart']:.0f} s, live {typical['command']:.1f} s"
    ratio = local["ratio"]
    rows = [
        ("digits: the rest", "see above", f"{rest:.1%}", f"≤ {REST:.0%}", verdict(rest <= REST)),
        ("digits: a start per trial", again, f"{ratio:.1f} times", f"≥ {STARTS:g}", verdict(ratio >= STARTS)),
    ]
    table(("claim", "from", "figure", "target", "reached"), rows)


def main() -> None:
    """Run the parts, print them and write the figures."""
    parser = options(__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3, help="studies of the digits job, with starts after each (3)")
    parser.add_argument("--starts", type=int, default=3, help="process starts measured in each round (3)")
    parser.add_argument("--seeds", type=int, default=5, help="studies at 200 Mbit/s, each without and with a diagnosis")
    parser.add_argument("--parts", nargs="+", choices=("digits", "slow"), default=["digits", "slow"])
    args = parser.parse_args()
    if args.quick:
        args.trials, args.rounds, args.starts, args.seeds = 6, 1, 1, 1
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tuning-cost-") as folder:
        if "digits" in args.parts:
            found["digits"] = digits(Path(folder) / "digits", args)
        if "slow" in args.parts:
            found["slow_link"] = slow_link(Path(folder) / "slow", args)
    typical = {"digits": found["digits"]["typical"]} if "digits" in found else {}
    show_costs(typical | {f"200 Mbit/s, {name}": costs[0] for name, costs in found.get("slow_link", {}).items()})
    if "digits" in found:
        show_starts(found["digits"])
    if "slow_link" in found:
        show_slow(found["slow_link"])
    write_json(args.json, found)


if __name__ == "__main__":
    main()
