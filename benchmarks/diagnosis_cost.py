"""Claim: twenty trials with the diagnosis before them cost at most 1.3 times what they cost without.

    python benchmarks/diagnosis_cost.py --json diagnosis_cost.json       # as root, on a quiet machine: 40 minutes

The same study runs with the default --diagnose-budget and with `--diagnose-budget 0`, in pairs whose order alternates
(AB BA …). Both of a pair have the same seed.

digits       recipes/digits on two local ranks: short steps, of which a diagnosis can afford many
wide layers  jobs/mlp.py with a batch of 256 on two local ranks: steps that compute for long
200 Mbit/s   jobs/mlp.py on two hosts, all rungs: steps of a second, and a link whose price is to be proved

A study's cost is its wall time from the start of the ranks to the end of tuning (`wall_seconds` in summary.json), with
its start-up and without: the target holds for both. A study whose script has little to win ends before its 20th trial,
and so the trials of both sides are shown too.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import MLP, Hosts, Lab, Local, gain, median, options, say, table, verdict, write_json
from lab import unavailable
from tuning_cost import AS_BATCHES, DIGITS, LASTING, TWO, study

TARGET = 1.3
ENDLESS = "--steps 1000000"  # the study ends the job


@dataclass(frozen=True)
class Job:
    """A script, and how it is tuned."""

    name: str
    command: str
    rate: str = ""
    """Of the link between two hosts with one rank each; "": two ranks on this machine."""
    more: tuple[str, ...] = ()
    """More options of autoddp."""


ALL_JOBS = [
    Job("digits", f"{DIGITS} {AS_BATCHES} {LASTING}"),
    Job("wide layers", f"{MLP} --batch 256 {ENDLESS}"),
    Job("200 Mbit/s", f"{MLP} {ENDLESS}", "200mbit", ("--allow", "lossy")),
]
SIDES: dict[str, tuple[str, ...]] = {"with": (), "without": ("--diagnose-budget", "0")}


def cost(here: Local, job: Job, side: str, seed: int, trials: int) -> dict[str, Any]:
    """What one study costs."""
    ranks = () if job.rate else TWO
    own = ["--seed", str(seed), "--budget", "15m", "--recipe", f"{side}{seed}.toml"]
    found = study(here, trials, *ranks, *job.more, *SIDES[side], *own, job.command)
    summary = here.summary()
    diagnosis = summary["diagnosis"]
    if (diagnosis is None) is (side == "with"):
        raise RuntimeError(f"{job.name}, {side}: the summary has {'no' if diagnosis is None else 'a'} diagnosis")
    found["diagnosis"] = summary["wall_seconds"].get("diagnosis", 0.0)
    found["findings"] = [f"{one['cause']}, {one['status']}" for one in (diagnosis or {"findings": []})["findings"]]
    found["tuning"] = found["total"] - found["parts"]["start-up"]
    shown = f"{found['total']:.1f} s, of it start-up {found['parts']['start-up']:.1f} s"
    say(f"{job.name}, {side}: {shown}, diagnosis {found['diagnosis']:.1f} s; {found['trials']} trials")
    return found


def measured(here: Local, job: Job, args: Namespace) -> dict[str, list[dict[str, Any]]]:
    """Side → its studies; number i of both sides belong together."""
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for seed in range(args.rounds):
        for side in list(SIDES)[:: 1 if seed % 2 == 0 else -1]:
            found[side].append(cost(here, job, side, seed, args.trials))
    return found


def of_all(studies: list[dict[str, Any]], name: str) -> list[float]:
    """One figure of each study."""
    return [float(study[name]) for study in studies]


def show(results: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    """The table: each job with its start-up and without."""
    rows: list[tuple[object, ...]] = []
    for name, sides in results.items():
        few = [f"{min(of_all(studies, 'trials')):.0f}" for studies in sides.values()]
        spent = f"{median(of_all(sides['with'], 'diagnosis')):.1f} s"
        for what, key in (("in all", "total"), ("without start-up", "tuning")):
            both = [of_all(studies, key) for studies in sides.values()]
            ratio = gain(both[0], both[1])
            times = " → ".join(f"{median(seconds):.1f} s" for seconds in reversed(both))
            judged = verdict(ratio.ratio <= TARGET)
            rows.append((name, what, " and ".join(few), spent, times, ratio, f"≤ {TARGET:g}", judged))
    head = ("job", "cost", "fewest trials", "diagnosis", "without → with", "times as much", "target", "reached")
    table(head, rows)
    for name, sides in results.items():
        found = [", ".join(study["findings"]) or "nothing" for study in sides["with"]]
        print(f"{name}: found {'; '.join(found)}")


def main() -> None:
    """Measure all jobs, print the table."""
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", choices=[job.name for job in ALL_JOBS], help="these jobs (all)")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=4, help="pairs of studies of each job (4)")
    args = parser.parse_args()
    if args.quick:
        args.trials, args.rounds = 6, 2
    if args.rounds < 2:
        parser.error("--rounds: an interval needs two or more")
    results = {}
    with tempfile.TemporaryDirectory(prefix="diagnosis-cost-") as folder:
        for job in ALL_JOBS:
            if args.only and job.name not in args.only:
                continue
            if job.rate and unavailable():
                say(f"left out: {job.name}: {unavailable()}")
                continue
            place = Path(folder, job.name.replace(" ", "-").replace("/", "-"))
            if job.rate:
                with Lab(2, job.rate) as lab:
                    results[job.name] = measured(Hosts(place, lab), job, args)
            else:
                results[job.name] = measured(Local(place), job, args)
    show(results)
    write_json(args.json, {"target": TARGET, "jobs": results})


if __name__ == "__main__":
    main()
