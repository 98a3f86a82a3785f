"""What each knob of a recipe gives: whole jobs with the recipe, and with each of its knobs taken back alone.

    python benchmarks/ablation.py --json ablation.json --keep recipes    # as root, on a quiet machine: 45 minutes
    python benchmarks/ablation.py --only characters vit_tiny --rate 1gbit        # on two hosts, where more can be won
    python benchmarks/ablation.py --recipe found.toml -- train.py --epochs 3     # a recipe and a script of yours

Without --recipe each job is tuned first (`autoddp --trials 20 --tune-only`). Then these sides take turns, whole job
after whole job, in alternating order (ABC CBA …):

as written    the script under torchrun
all           the script under the recipe
without X     the script under a copy of the recipe that lacks the knob X. A hook is taken back with its own knobs.

What a knob gives is the speed-up of `all` over `without X`, with a 99 % interval; as a share, it is how much of a step
without the knob goes when the knob comes back. Knobs that do the same thing give little when one of them is taken back
alone, so the shares do not add up.

A step lasts from the end of an optimizer step to the end of the next (jobs/timed.py), so the script needs no options
for it. The median of a job's steps counts, and the mean over its ranks. In a recipe PowerSGD begins at torch's default,
step 1000, which a short job does not reach: here all copies have powersgd_start_step = 5, and only later steps count.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import (
    JOBS,
    MLP,
    ROOT,
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
    write_json,
)
from lab import unavailable

from autoddp.knobs import BY_NAME, Configuration
from autoddp.knobs.hook import POWERSGD_START_STEP
from autoddp.recipe import Recipe, load, save
from autoddp.timing import Speedup

TIMED = str(JOBS / "timed.py")
START = 5  # powersgd_start_step of all copies
TWO = ["--nproc-per-node", "2"]
AS_WRITTEN, ALL = "as written", "all"


@dataclass(frozen=True)
class Job:
    """A script, how it is tuned, and how it is measured."""

    name: str
    script: tuple[str, ...]
    """The script, and arguments of both runs; what runs it stands before it."""
    lasting: tuple[str, ...] = ()
    """More arguments, with which it lasts for a whole study."""
    short: tuple[str, ...] = ()
    """More arguments, with which it ends after the steps that are measured."""
    warmup: int = 30
    """Steps that are not measured."""
    rate: str = ""
    """Of the link between two hosts with one rank each; "": two ranks on this machine."""
    allow: str = "near"
    budget: str = "5m"

    @property
    def recipe_name(self) -> str:
        """As recipes/README.md says: model-nodesxgpus-hardware-link."""
        return f"{self.name}-2x1-cpu-{self.rate}" if self.rate else f"{self.name}-1x2-cpu-loopback"


def _script(name: str) -> str:
    return str(ROOT / "recipes" / name / "train.py")


VISION = str(ROOT / "tests" / "run_with_torchvision.py")
ALL_JOBS = [
    Job("digits", (_script("digits"),), ("--epochs", "400"), ("--epochs", "30")),
    Job("characters", (_script("characters"),), ("--steps", "100000"), ("--steps", "330")),
    Job("fashion_mnist", (_script("fashion_mnist"),), ("--epochs", "100"), ("--steps", "430")),
    Job("vit_tiny", (VISION, _script("vit"), "--model", "tiny"), ("--steps", "100000"), ("--steps", "430")),
    # The steps of the first hosts take a second each, so fewer of them count.
    Job("mlp", (MLP,), ("--steps", "1000000"), ("--steps", "20"), START + 3, "200mbit", "lossy", "10m"),
]


# ------------------------------------------------------------------------- recipes


def launched(recipe: Recipe) -> dict[str, Any]:
    """All that a recipe launches: knobs, and the variables that it sets."""
    return {**recipe.configuration.plain(), **recipe.env}


def without(recipe: Recipe, name: str) -> Recipe:
    """A copy that lacks this knob, and knobs that mean nothing without it. ValueError where others need it."""
    if name in recipe.env:
        return replace(recipe, env={other: value for other, value in recipe.env.items() if other != name})
    values = dict(recipe.configuration)
    del values[name]
    for other in recipe.configuration:
        needs = BY_NAME[other].needs
        if needs and needs[0] == name:
            del values[other]
    return replace(recipe, configuration=Configuration(values))


def early(recipe: Recipe) -> Recipe:
    """A copy in which compression begins before the steps that count."""
    if POWERSGD_START_STEP.of(recipe.configuration) is None:
        return recipe
    started = recipe.configuration.with_values(**{POWERSGD_START_STEP.name: START})
    return replace(recipe, configuration=started)


def copies(recipe: Recipe) -> dict[str, Recipe]:
    """Side → recipe. A knob that others need is taken back with the one that needs it."""
    found = {ALL: early(recipe)}
    for name in launched(recipe):
        if name == POWERSGD_START_STEP.name:  # no knob of a step's speed
            continue
        try:
            copy = early(without(recipe, name))
        except ValueError:  # the rank of PowerSGD, without which there is no PowerSGD
            continue
        found[f"without {name}"] = copy
    return found


# ------------------------------------------------------------------------- jobs


def ranks(here: Local) -> list[str]:
    """torchrun's options for the ranks of one host; `Hosts` puts in those of several."""
    return [] if isinstance(here, Hosts) else TWO


def tuned(here: Local, job: Job, args: Namespace) -> Recipe:
    """The recipe of one study."""
    own = ["--trials", str(args.trials), "--allow", job.allow, "--budget", job.budget, "--seed", str(args.seed)]
    words = [*autoddp(*ranks(here), *own, "--tune-only", "--recipe", "found.toml"), *job.script, *job.lasting]
    say(f"{job.name}: tuned in {here.run(words, timeout=900):.0f} s")
    return load(here.home(0) / "found.toml")


def step_seconds(here: Local, launcher: list[str], job: Job, at_once: int = 1) -> float:
    """Median seconds of a step in one whole job, the mean over its ranks; RuntimeError if it has too few of them.

    If `at_once` steps of the script become one, it is the median over such groups.
    """
    with tempfile.TemporaryDirectory(dir=here.folder) as folder:
        here.run([*launcher, TIMED, folder, *job.script, *job.short])
        stamps = [[float(line) for line in path.read_text().split()] for path in sorted(Path(folder).iterdir())]
    found = []
    for ends in stamps:
        marks = ends[job.warmup :: at_once]
        if len(marks) < 3:
            raise RuntimeError(f"{job.name} made {len(ends)} steps, {job.warmup} of them to warm up: let it make more")
        found.append(median([(after - before) / at_once for before, after in pairwise(marks)]))
    if len(found) != 2:
        raise RuntimeError(f"{job.name}: {len(found)} ranks made optimizer steps, not 2")
    return sum(found) / len(found)


def under(here: Local, path: Path, recipe: Recipe, job: Job) -> float:
    """The same under a recipe; RuntimeError where the job did not get what the recipe says."""
    at_once = recipe.configuration.steps_per_update
    seconds = step_seconds(here, autoddp(*ranks(here), "--recipe", str(path)), job, at_once)
    log = max(here.folder.glob("run*.log"), key=lambda one: one.stat().st_mtime).read_text()
    # The launcher says what it launches. A worker that finds another model says that it leaves the recipe out.
    if f"launching {recipe.configuration}" not in log or "runs as written" in log:
        raise RuntimeError(f"{path.name} was not launched as it says:\n{log[-3000:]}")
    return seconds


def sides(here: Local, job: Job, recipe: Recipe) -> dict[str, Callable[[], float]]:
    """Side → a whole job of it."""
    found: dict[str, Callable[[], float]] = {AS_WRITTEN: lambda: step_seconds(here, torchrun(*ranks(here)), job)}
    for number, (name, copy) in enumerate(copies(recipe).items()):
        if name != ALL and not launched(copy):
            continue  # nothing is left, which is as written
        path = (here.folder / f"side{number}.toml").resolve()
        save(copy, path)
        found[name] = lambda path=path, copy=copy: under(here, path, copy, job)  # type: ignore[misc]
    return found


def measured(here: Local, job: Job, args: Namespace) -> dict[str, Any]:
    """Tune if need be, then let the sides take turns."""
    recipe = load(args.recipe) if args.recipe else tuned(here, job, args)
    say(f"{job.name}: the recipe launches {json.dumps(launched(recipe))}")
    found: dict[str, Any] = {"launched": launched(recipe), "why": recipe.evidence.why, "rate": job.rate}
    if not launched(recipe):
        return {**found, "seconds": {}, "gave": {}}
    if args.keep and not args.recipe:
        keep(recipe, job, args.keep)
    seconds = paired(sides(here, job, recipe), args.rounds)
    gave = {}
    for name in copies(recipe):
        if name != ALL:
            # With one knob alone, the recipe without it is the script as written.
            before = seconds.get(name, seconds[AS_WRITTEN])
            gave[name.removeprefix("without ")] = (median(before), gain(before, seconds[ALL]))
    return {**found, "seconds": seconds, "gave": gave}


def keep(recipe: Recipe, job: Job, folder: Path) -> None:
    """Save the recipe in this folder under its usual name, with the script as it is seen from there.

    The run that it names is left out, because that run's folder goes when the benchmark ends.
    """
    script = next(Path(word) for word in reversed(job.script) if word.endswith(".py"))
    seen = os.path.relpath(script, folder.resolve())
    if seen.startswith(os.pardir):
        seen = os.path.join("*", script.parent.name, script.name)
    path = folder / f"{job.recipe_name}.toml"
    fits, evidence = replace(recipe.fits, script=seen), replace(recipe.evidence, run="")
    older = save(replace(recipe, fits=fits, evidence=evidence), path, previous=folder / f"{path.name}.old")
    say(f"{job.name}: kept as {path}" + (f", the older one as {older}" if older else ""))


# ------------------------------------------------------------------------- tables


def share(gave: Speedup) -> str:
    """What part of a step goes, with its interval."""
    part, low, high = (1 - 1 / one if one else float("-inf") for one in (gave.ratio, gave.low, gave.high))
    return f"{part:+.1%} ({low:+.1%} to {high:+.1%})"


def says(gave: Speedup) -> str:
    """Whether the interval says anything."""
    if gave.low > 1.0:
        return "gives"
    return "takes" if gave.high < 1.0 else "not sure"


def show(name: str, found: dict[str, Any]) -> None:
    """The table of one job."""
    print(f"{name}, {found['rate'] or 'loopback'}: {json.dumps(found['launched'])}")
    if not found["launched"]:
        print(f"    the script as written is launched ({found['why']}): there is no knob to take back\n")
        return
    seconds = found["seconds"]
    whole = gain(seconds[AS_WRITTEN], seconds[ALL])
    rows: list[tuple[object, ...]] = [("as written", f"{median(seconds[AS_WRITTEN]) * 1e3:.2f}", "", "", "")]
    rows.append(("all knobs", f"{median(seconds[ALL]) * 1e3:.2f}", whole, share(whole), says(whole)))
    for knob, (before, gave) in found["gave"].items():
        rows.append((f"without {knob}", f"{before * 1e3:.2f}", gave, share(gave), says(gave)))
    table(("side", "ms per step", "speed-up by what is missing", "of a step", "the knob"), rows)


def plain(found: dict[str, Any]) -> dict[str, Any]:
    """For JSON."""
    gave = {
        name: {"ms": before * 1e3, "ratio": one.ratio, "low": one.low, "high": one.high}
        for name, (before, one) in found["gave"].items()
    }
    return {**found, "gave": gave}


def chosen(args: Namespace) -> list[Job]:
    """The jobs of the command line."""
    if args.command:
        allow = args.allow or "near"
        warmup = max(args.warmup, START + 3)  # of PowerSGD only compressed steps count
        return [Job(Path(args.command[0]).stem, tuple(args.command), warmup=warmup, rate=args.rate, allow=allow)]
    names = args.only or [job.name for job in ALL_JOBS]
    found = [job for job in ALL_JOBS if job.name in names]
    if args.rate:
        found = [replace(job, rate=args.rate, budget="10m") for job in found]
    return [replace(job, allow=args.allow) for job in found] if args.allow else found


def main() -> None:
    """Measure each job, print the tables."""
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", choices=[job.name for job in ALL_JOBS], help="these jobs (all)")
    parser.add_argument("--recipe", type=Path, metavar="FILE", help="of the one job that is measured (it is tuned)")
    parser.add_argument("--rate", default="", help="two hosts over a link of this rate, in place of local ranks")
    parser.add_argument("--allow", choices=("exact", "near", "lossy"), help="in tuning (near; mlp: lossy)")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the study (0)")
    parser.add_argument("--rounds", type=int, default=8, help="of whole jobs, each side once (8)")
    parser.add_argument("--warmup", type=int, default=30, help="steps of your own script that do not count (30)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="save tuned recipes that launch something here")
    parser.add_argument("command", nargs="*", help="-- SCRIPT ARGUMENTS: your own job in place of those listed")
    args = parser.parse_args()
    if args.quick:
        args.trials, args.rounds = 6, 2
    if args.rounds < 2:
        parser.error("--rounds: an interval needs two or more")
    jobs = chosen(args)
    if args.recipe and len(jobs) != 1:
        parser.error("--recipe: name the job that it belongs to, by --only or as -- SCRIPT")
    results = {}
    with tempfile.TemporaryDirectory(prefix="ablation-") as folder:
        for job in jobs:
            if job.rate and unavailable():
                say(f"left out: {job.name}: {unavailable()}")
                continue
            place = Path(folder, job.name)
            if job.rate:
                with Lab(2, job.rate) as lab:
                    results[job.name] = measured(Hosts(place, lab), job, args)
            else:
                results[job.name] = measured(Local(place), job, args)
            show(job.name, results[job.name])
    if not results:
        sys.exit("nothing was measured")
    write_json(args.json, {"rounds": args.rounds, "jobs": {name: plain(found) for name, found in results.items()}})


if __name__ == "__main__":
    main()
