"""Claim: a short script ends with the gain that a long one gets, and whatever ends tuning, with a decision.

    python benchmarks/main_job.py --json main_job.json                # as root: about an hour and a half
    python benchmarks/main_job.py --whole --json main_job.json        # all lengths and rungs: about four hours

Whole jobs, `autoddp jobs/mlp.py --steps N`, tuned and then launched, against torchrun: on two hosts joined by
200 Mbit/s, and as two ranks of one host, for scripts of different lengths, with and without `--trials 20`. Of each job
the same launched steps are timed, at most 60, and no more than the shortest script has of which something is claimed:
the steps of a job get shorter during its first fifty. Then it ends. Beside each job torchrun runs some steps of the
same script; the speed-up is the ratio of the medians. *seconds* and *steps* are those until the decision.

Claimed: a script of 30 steps or more reaches 90 % of the speed-up of the longest one, under `--trials 20`.
In a recipe PowerSGD begins at step 1000. The lossy jobs say that they are short (`--job-steps`), and their steps count
from there on.
"""

from __future__ import annotations

import re
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from common import MLP, Hosts, Lab, Local, autoddp, options, say, table, torchrun, verdict, write_json

REACHED = 0.9  # of the longest script's speed-up
FEWEST = 30  # steps of a script of which that is claimed
LAUNCHED = 60  # steps of a job that are made at most, once it is launched
WARMUP = 4
JOB_STEPS = 100  # of the lossy jobs: PowerSGD begins after a tenth of them
LIMIT = 900.0  # seconds of one job
LENGTHS, ALL_LENGTHS = [15, 30, 60, 2000], [15, 30, 60, 120, 300, 2000]
LINKS = {"200mbit": "200mbit", "loopback": None}


def one_job(jobs: Local, length: int, rung: str, trials: int | None, own: list[str], launches: int) -> dict[str, Any]:
    """Tune and launch a script of `length` steps, of which it makes `launches` at most once it is launched."""
    script = [MLP, "--steps", str(length), "--launched", str(launches)]
    skipped = JOB_STEPS // 10 + 3 if rung == "lossy" and length > JOB_STEPS // 10 + 3 else WARMUP
    base = jobs.step_seconds([*torchrun(*own), MLP, "--steps", str(WARMUP + 12)], WARMUP)
    asked = [*([] if trials is None else ["--trials", str(trials)]), "--allow", rung]
    asked += ["--job-steps", str(JOB_STEPS)] if rung == "lossy" else []
    launched = jobs.step_seconds([*autoddp(*own, *asked), *script], skipped, timeout=LIMIT)
    figures = {"length": length, "rung": rung, "trials": trials, "torchrun": base, "launched": launched}
    return {**figures, "speedup": base / launched, **came_to(jobs)}


def came_to(jobs: Local) -> dict[str, Any]:
    """What tuning took, and what came of it. Of a script that gives no baseline no steps are counted."""
    found = jobs.summary()
    values, why = found["decision"]["configuration"], found["decision"]["why"]
    outcome = " ".join(f"{name}={value}" for name, value in sorted(values.items())) or "as written"
    return {
        "seconds": found["wall_seconds"]["total"],
        "steps": sum(found["steps"].values()) if "steps" in found else None,
        "tried": len(found["trials"]),
        "outcome": f"undecided, {outcome}" if re.match("undecided|there was no time", why) else outcome,
        "why": why,
    }


def on_link(link: str, folder: Path, args: Namespace) -> list[dict[str, Any]]:
    """All jobs on one link, each in a folder of its own, so that none finds another's recipe."""
    found = []
    launches = min([LAUNCHED, *(length for length in args.lengths if length >= FEWEST)])
    for trials in args.with_trials:
        for rung in args.rungs:
            for length in args.lengths:
                place = folder / f"{link}-{length}-{rung}-{trials}"
                if LINKS[link] is None:
                    one = one_job(Local(place), length, rung, trials, ["--nproc-per-node", "2"], launches)
                else:
                    with Lab(2, LINKS[link]) as lab:
                        one = one_job(Hosts(place, lab), length, rung, trials, [], launches)
                say(f"{link}, {length} steps, {rung}, --trials {trials}: ×{one['speedup']:.2f}, {one['why']}")
                found.append({"link": link, **one})
    return found


def reached(one: dict[str, Any], results: list[dict[str, Any]]) -> bool | None:
    """Whether a short script has reached what the longest has; None where that is not claimed."""
    alike = [r for r in results if all(r[name] == one[name] for name in ("link", "rung", "trials"))]
    longest = max(alike, key=lambda other: other["length"])
    if one is longest or one["length"] < FEWEST or one["trials"] is None or one["link"] == "loopback":
        return None
    return bool(one["speedup"] >= REACHED * longest["speedup"])


def show(results: list[dict[str, Any]]) -> None:
    """One row a job."""
    rows = []
    for one in results:
        as_claimed = reached(one, results)
        rows.append(
            (
                one["link"],
                one["length"],
                one["rung"],
                one["trials"] or "not given",
                f"{one['torchrun'] * 1e3:.0f} → {one['launched'] * 1e3:.0f}",
                f"×{one['speedup']:.2f}",
                "" if as_claimed is None else verdict(as_claimed),
                f"{one['seconds']:.0f}",
                "-" if one["steps"] is None else one["steps"],
                one["tried"],
                one["outcome"],
            )
        )
    head = ("link", "steps of the script", "rung", "--trials", "ms per step", "against torchrun", "≥ 90 %", "seconds")
    table((*head, "steps", "tried", "launched"), rows)


def main() -> None:
    """Run all jobs, print the table and write the figures after each link."""
    parser = options(__doc__)
    parser.add_argument("--whole", action="store_true", help="all lengths, on both rungs")
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=list(LINKS))
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="steps of the scripts")
    parser.add_argument("--rungs", nargs="+", choices=["near", "lossy"], default=["near"])
    parser.add_argument("--with-trials", nargs="+", default=["20", "none"], help="numbers, or none for not given")
    args = parser.parse_args()
    if args.whole:
        args.lengths, args.rungs = ALL_LENGTHS, ["near", "lossy"]
    if args.quick:
        args.lengths, args.links, args.with_trials = [30], ["loopback"], ["2"]
    args.with_trials = [None if word == "none" else int(word) for word in args.with_trials]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="main-job-") as folder:
        for link in args.links:
            results += on_link(link, Path(folder), args)
            write_json(args.json, {"results": results})
    show(results)


if __name__ == "__main__":
    main()
