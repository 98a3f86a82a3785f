"""Claim: exact does not change training, and near less than seeds differ; the change of lossy and batch is shown.

    python benchmarks/convergence.py --json convergence.json        # about 15 minutes

Two tasks on two local ranks: handwritten digits, and a character model on the sources of Python's standard library.
One study of each task gives every rung's winner. Then the task is trained to the end under torchrun (the baseline) and
under a recipe with each winner, for the same seeds. PowerSGD begins after a tenth of the steps. For batch four steps
become one on top of the exact winner. The learning rate is not changed, as if a user changed nothing else.

`difference` is the mean over the seeds of winner minus baseline, with its 95 % interval (Student's t, paired by seed).
For exact the curves are compared too: the largest relative difference of a printed training loss in the first third of
the run, before rounding has grown.
"""

from __future__ import annotations

import re
import statistics
import tempfile
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import ROOT, Local, autoddp, options, say, table, torchrun, verdict, write_json
from scipy.stats import t

from autoddp.knobs import AS_WRITTEN, Configuration, Rung
from autoddp.recipe import load, save

AT_ONCE = 4
_ATTEMPTS = 5
TWO = ["--nproc-per-node", "2"]


@dataclass(frozen=True)
class Task:
    """`final` finds the result in the script's output, `losses` the training's curve."""

    script: str
    words: tuple[str, ...]
    steps: int
    final: str
    unit: str
    losses: str = r"loss (\d+\.\d+)"


TASKS = {
    "digits": Task("digits", ("--epochs", "20"), 900, r"test accuracy (\d+\.\d+)", "% right"),
    "characters": Task("characters", ("--steps", "600"), 600, r"test loss (\d+\.\d+)", "nats"),
}


def winners(local: Local, task: Task, trials: int) -> dict[str, str]:
    """Rung → a recipe that launches its winner."""
    script = str(ROOT / "recipes" / task.script / "train.py")
    own = ["--trials", str(trials), "--tune-only", "--allow", "lossy", "--recipe", "tuned.toml"]
    local.run([*autoddp(*TWO, *own), script, *task.words])
    tuned = load(local.home(0) / "tuned.toml")
    found: dict[str, Configuration] = {}
    for entry in tuned.ladder:
        configuration = entry.configuration
        if entry.rung is Rung.LOSSY:
            configuration = configuration.with_values(powersgd_start_step=task.steps // 10)
        found[entry.rung.value] = configuration
    exact = {name: value for name, value in found.get("exact", AS_WRITTEN).items() if name != "static_graph"}
    found["batch"] = Configuration({**exact, "accumulate_steps": AT_ONCE})
    for rung, configuration in found.items():
        save(replace(tuned, configuration=configuration, env={}), local.home(0) / f"{rung}.toml")
    return {rung: str(configuration) for rung, configuration in found.items()}


def train(local: Local, task: Task, seed: int, launcher: list[str]) -> dict[str, Any]:
    """Train once to the end; the result and the curve of losses."""
    script = str(ROOT / "recipes" / task.script / "train.py")
    words = [*launcher, script, *task.words, "--seed", str(seed)]
    for attempt in range(_ATTEMPTS):
        try:
            local.run(words)
            break
        except RuntimeError as problem:
            if "terminate called" not in str(problem) or attempt == _ATTEMPTS - 1:
                raise
            say("torch aborted while the interpreter ended, as 2.13 now and then does: this training is made again")
    said = max(local.folder.glob("run*.log"), key=lambda path: path.stat().st_mtime).read_text()
    return {
        "final": float(re.findall(task.final, said)[-1]),
        "losses": [float(loss) for loss in re.findall(task.losses, said.split("test")[0])],
    }


def difference(baseline: list[float], winner: list[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval."""
    pairs = [b - a for a, b in zip(baseline, winner, strict=True)]
    if len(pairs) < 2:
        return pairs[0], float("inf")
    half = t.ppf(0.975, len(pairs) - 1) * statistics.stdev(pairs) / len(pairs) ** 0.5
    return statistics.mean(pairs), float(half)


def curves_apart(baseline: list[dict[str, Any]], winner: list[dict[str, Any]]) -> float:
    """The largest relative difference in the first third."""
    apart = 0.0
    for one, other in zip(baseline, winner, strict=True):
        third = max(1, len(one["losses"]) // 3)
        pairs = zip(one["losses"][:third], other["losses"][:third], strict=True)
        apart = max(apart, *(abs(a - b) / a for a, b in pairs))
    return apart


def one_task(name: str, args: Namespace) -> dict[str, Any]:
    """Every rung's winner and the baseline, for each seed."""
    task = TASKS[name]
    with tempfile.TemporaryDirectory(prefix="convergence-") as folder:
        local = Local(Path(folder))
        found = winners(local, task, args.trials)
        say(f"{name}: {found}")
        launchers = {"baseline": torchrun(*TWO), **{r: autoddp(*TWO, "--recipe", f"{r}.toml") for r in found}}
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in launchers}
        for seed in range(args.seeds):
            for side, launcher in launchers.items():
                runs[side].append(train(local, task, seed, launcher))
            say(f"{name}, seed {seed}: " + "  ".join(f"{side} {of[-1]['final']:g}" for side, of in runs.items()))
    return {"configurations": {"baseline": str(Configuration({})), **found}, "runs": runs}


def rows_of(name: str, found: dict[str, Any]) -> list[list[object]]:
    """The table's rows of one task."""
    finals = {side: [run["final"] for run in runs] for side, runs in found["runs"].items()}
    spread = max(finals["baseline"]) - min(finals["baseline"])
    rows: list[list[object]] = []
    for side, values in finals.items():
        middle, half = difference(finals["baseline"], values)
        apart = curves_apart(found["runs"]["baseline"], found["runs"][side])
        within = {"exact": apart <= 0.01, "near": abs(middle) <= max(spread, half)}
        shown = f"{statistics.mean(values):.4g} ({min(values):g} to {max(values):g}) {TASKS[name].unit}"
        moved = "" if side == "baseline" else f"{middle:+.2g} (± {half:.2g})"
        as_claimed = verdict(within[side]) if side in within else ""
        rows.append([name, side, shown, moved, f"{apart:.1e}", as_claimed, found["configurations"][side]])
    return rows


def main() -> None:
    """Run both tasks and print one table."""
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=20)
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.trials = 1, 6
    results = {name: one_task(name, args) for name in TASKS}
    head = ["task", "side", "result over the seeds", "difference", "curves apart", "as claimed", "configuration"]
    table(head, [row for name, found in results.items() for row in rows_of(name, found)])
    write_json(args.json, {"results": results})


if __name__ == "__main__":
    main()
