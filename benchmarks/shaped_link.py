"""Claim: over a slow link autoddp's launched job beats torchrun's by these factors, and its search misses little.

    python benchmarks/shaped_link.py --json shaped_link.json          # as root, on a quiet machine: about half an hour

Two hosts (network namespaces on a shaped link) with one rank each train jobs/mlp.py. At each rate, in one run:

tuning  `autoddp --trials 20 --allow lossy --tune-only` for every seed.
launch  seed 0's recipe on the near rung, and its lossy configuration, against torchrun. Whole jobs alternate
        (ABC CBA …); the median step after the warm-up counts. Targets: 200 Mbit/s near 1.9, lossy 12; 1 Gbit/s near
        1.4.
        In a recipe PowerSGD begins at torch's default, step 1000. A short run would not get there, so the lossy job
        uses a copy of the recipe with powersgd_start_step = 5; only steps after that are counted.
regret  the time of each seed's winner on each rung over that of the best of an exhaustive grid of the same knobs,
        minus 1, both measured again side by side (grid.py). Target: 3 % at most.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import (
    MLP,
    ROOT,
    Hosts,
    Lab,
    autoddp,
    environment,
    gain,
    median,
    options,
    paired,
    say,
    table,
    torchrun,
    verdict,
)
from common import write_json as write

from autoddp.knobs import GRADIENT_RUNGS, Configuration
from autoddp.recipe import load, save

TARGETS = {"200mbit": {"near": 1.9, "lossy": 12.0}, "1gbit": {"near": 1.4}}
REGRET = 0.03
GRID_TIMEOUT = 1800.0  # seconds; the default is for single jobs
START = 5  # powersgd_start_step of the lossy job
ENDLESS = ["--steps", "1000000"]  # the study ends the job


def tune(hosts: Hosts, seed: int, args: Namespace) -> dict[str, Any]:
    """Run one study; its recipe is seed<n>.toml in every host's folder."""
    recipe = ["--recipe", f"seed{seed}.toml"]
    trials = ["--trials", str(args.trials), "--allow", "lossy", "--tune-only", "--seed", str(seed), "--budget", "10m"]
    wall = hosts.run([*autoddp(*trials, *recipe), MLP, *ENDLESS])
    summary = hosts.summary()
    found = ", ".join(f"{s['rung']} ×{s['speedup']['ratio']:.3g}" for s in summary["ladder"])
    say(f"seed {seed}: {wall:.0f} s; {found}")
    winners = {standing["rung"]: standing["configuration"] for standing in summary["ladder"]}
    return {"seed": seed, "wall_seconds": wall, "winners": winners, "summary": summary}


def lossy_recipe(hosts: Hosts, study: dict[str, Any]) -> str | None:
    """A copy of seed0.toml with the lossy winner and an early start, on every host; None without a lossy winner."""
    winner = study["winners"].get("lossy")
    if winner is None:
        return None
    for host in range(len(hosts.lab)):
        recipe = load(hosts.home(host) / "seed0.toml")
        early = Configuration({**winner, "powersgd_start_step": START})
        save(replace(recipe, configuration=early), hosts.home(host) / "lossy.toml")
    return "lossy.toml"


def launches(hosts: Hosts, study: dict[str, Any], args: Namespace) -> dict[str, list[float]]:
    """Seconds per step of whole jobs, side by side."""
    slow = study["summary"]["baseline"]["seconds"] > 0.5
    warmup, steps = (2, 8) if slow else (4, 30)
    job = [MLP, "--steps", str(warmup + steps)]
    early = [MLP, "--steps", str(START + 3 + 25)]
    near = ["--recipe", "seed0.toml", "--allow", "near"]
    sides = {
        "torchrun": lambda: hosts.step_seconds([*torchrun(), *job], warmup),
        "near": lambda: hosts.step_seconds([*autoddp(*near), *job], warmup),
    }
    recipe = lossy_recipe(hosts, study)
    if recipe is not None:
        lossy = ["--recipe", recipe]
        sides["lossy"] = lambda: hosts.step_seconds([*autoddp(*lossy), *early], START + 3)
    return paired(sides, args.rounds)


def grid(hosts: Hosts, studies: list[dict[str, Any]], args: Namespace) -> dict[str, Any]:
    """The exhaustive grid, and every seed's winners measured again beside its best."""
    summary = hosts.folder / "summary.json"
    summary.write_text(json.dumps(studies[0]["summary"]))
    command = [sys.executable, str(ROOT / "benchmarks/layouts.py"), "--summary", str(summary)]
    layouts = json.loads(subprocess.run(command, env=environment(), check=True, capture_output=True).stdout)
    rungs = {rung for study in studies for rung in study["winners"]}
    winners = {rung: [study["winners"][rung] for study in studies if rung in study["winners"]] for rung in rungs}
    task = hosts.folder / "task.json"
    thin = 12 if args.quick else 1
    task.write_text(json.dumps({"rungs": args.rungs, "winners": winners, "layouts": layouts, "thin": thin}))
    driver = [sys.executable, "-u", str(ROOT / "benchmarks/grid.py"), "--task", str(task), "--budget", "2h"]
    say(f"grid: {hosts.run([*driver, MLP, *ENDLESS], timeout=GRID_TIMEOUT):.0f} s")
    found: dict[str, Any] = json.loads((hosts.home(0) / "grid.json").read_text())
    return found


def regrets(grid: dict[str, Any], studies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One for each rung and seed; a winner with the buckets and switches of the grid's best has none by definition."""
    found = []
    for rung, measured in grid["rungs"].items():
        tuned = [study for study in studies if rung in study["winners"]]
        for study, winner in zip(tuned, measured["winners"], strict=True):
            over = gain(winner["rounds"], measured["best"]["rounds"])
            ends = (0.0, 0.0, 0.0) if winner["same"] else (over.ratio - 1, over.low - 1, over.high - 1)
            found.append(
                {"rung": rung, "seed": study["seed"], **dict(zip(("regret", "low", "high"), ends, strict=True))}
            )
    return found


def at_rate(rate: str, folder: Path, args: Namespace) -> dict[str, Any]:
    """All three parts on one lab."""
    say(f"{rate}: tuning with {args.seeds} seeds")
    with Lab(2, rate) as lab:
        hosts = Hosts(folder / rate, lab)
        studies = [tune(hosts, seed, args) for seed in range(args.seeds)]
        seconds = launches(hosts, studies[0], args)
        measured = grid(hosts, studies, args)
    return {"studies": studies, "launches": seconds, "grid": measured, "regrets": regrets(measured, studies)}


def show(results: dict[str, Any]) -> None:
    """Two tables."""
    rows: list[tuple[object, ...]] = []
    for rate, found in results.items():
        base = found["launches"]["torchrun"]
        for rung, target in TARGETS[rate].items():
            if rung not in found["launches"]:
                rows.append((rate, rung, "-", "no winner", f"{target:g}", verdict(False)))
                continue
            ratio = gain(base, found["launches"][rung])
            ms = f"{median(base) * 1e3:.0f} → {median(found['launches'][rung]) * 1e3:.0f}"
            rows.append((rate, rung, ms, ratio, f"{target:g}", verdict(ratio.ratio >= target)))
    table(("link", "rung", "ms per step", "against torchrun", "target", "reached"), rows)
    rows = []
    for rate, found in results.items():
        for rung, measured in found["grid"]["rungs"].items():
            of_rung = [r for r in found["regrets"] if r["rung"] == rung]
            each = "  ".join(f"{r['regret']:+.1%}" for r in of_rung)
            counts = f"{measured['configurations']} ({measured['distinct']})"
            good = bool(of_rung) and all(r["regret"] <= REGRET for r in of_rung)
            rows.append((rate, rung, counts, measured["best"]["reads"], each, verdict(good)))
    table(("link", "rung", "grid (distinct)", "best of the grid", "regret by seed", f"≤ {REGRET:.0%}"), rows)


def main() -> None:
    """Run all rates, print the tables and write the figures."""
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4, help="of whole jobs, each side once")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--rates", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    rungs = [rung.value for rung in GRADIENT_RUNGS]
    parser.add_argument("--rungs", nargs="+", choices=rungs, default=rungs, help="of which the regret is measured")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.rounds, args.trials = 1, 2, 6
    with tempfile.TemporaryDirectory(prefix="shaped-link-") as folder:
        results = {rate: at_rate(rate, Path(folder), args) for rate in args.rates}
    show(results)
    write(args.json, {"results": results})


if __name__ == "__main__":
    main()
