"""Claim: a job with a recipe's settings in its own code takes the same steps as under the recipe.

    python benchmarks/own_code.py --json own_code.json                # on a quiet machine: about half an hour

jobs/mlp.py on two local ranks. One side is `autoddp --recipe` on the script as it is. The other side is plain torchrun
on the same script with the lines that `autoddp recipe code` prints, as printed. Whole jobs alternate (AB BA …).
Target: the 99 % interval of the difference contains 0, and lies within 5 %. Of `ddp, fp16`, where torch's own hook
stands for ours, nothing is claimed: the table says what the nearest hook gives.
"""

from __future__ import annotations

import shlex
import tempfile
import textwrap
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from common import JOBS, MLP, Local, autoddp, gain, median, options, paired, say, table, torchrun, write_json

from autoddp.knobs import Configuration
from autoddp.own_code import lines_for
from autoddp.recipe import Recipe, load, save
from autoddp.timing import Speedup

TWO = ["--nproc-per-node", "2"]
LIMIT = 0.05  # of a step, to either side
EXACT = Configuration({"bucket_cap_mb": 16.0, "gradient_as_bucket_view": True})
KEEPS_MEMORY = "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=4294967296"


@dataclass(frozen=True)
class Case:
    """A recipe's settings, and the form of code in which the other side has them."""

    form: str
    configuration: Configuration
    claimed: bool = True


CASES = {
    "ddp": Case("ddp", EXACT),
    "ddp, fp16": Case("ddp", Configuration({"bucket_cap_mb": 16.0, "hook": "fp16"}), claimed=False),
    "accelerate": Case("accelerate", EXACT),
    "env": Case("env", Configuration({"malloc": KEEPS_MEMORY})),
}
_SCRIPT = """\
import os
import sys

sys.path.insert(0, {jobs!r})
os.environ["ACCELERATE_USE_CPU"] = "true"
import mlp


def wrap(model, args, device):
{lines}
    return {wrapped}


mlp.wrap = wrap
mlp.main()
os._exit(0)
"""
_WRAPPED = {"ddp": "model", "accelerate": "accelerator.prepare(model)"}
"""Form → the DDP object, where its lines have run."""


def make_recipe(local: Local) -> Recipe:
    """A recipe for this job, from a real study."""
    local.run([*autoddp(*TWO, "--trials", "1", "--tune-only", "--recipe", "found.toml"), MLP, "--steps", "1000000"])
    return load(local.home(0) / "found.toml")


def both_sides(local: Local, name: str, recipe: Recipe) -> tuple[list[str], list[str]]:
    """The commands up to the job's options: with the recipe, and with its lines."""
    case, home, file = CASES[name], local.home(0), f"{name.replace(', ', '-')}.toml"
    recipe = replace(recipe, configuration=case.configuration, env={})
    save(recipe, home / file)
    lines, script = lines_for(recipe, file, case.form).text, MLP
    if case.form in _WRAPPED:
        written = home / f"job-{name.replace(', ', '-')}.py"  # not the name of a package that it imports
        indented = textwrap.indent(lines, "    ")
        written.write_text(_SCRIPT.format(jobs=str(JOBS), lines=indented, wrapped=_WRAPPED[case.form]))
        script = str(written)
    theirs = [*torchrun(*TWO), script]
    if case.form == "env":
        theirs = ["sh", "-c", f'{lines}\nexec {shlex.join(theirs)} "$@"', "sh"]
    return [*autoddp(*TWO, "--recipe", file), MLP], theirs


def compared(local: Local, name: str, recipe: Recipe, args: Namespace) -> dict[str, list[float]]:
    """Seconds per step of whole jobs on both sides."""
    count = ["--steps", str(args.warmup + args.steps)]
    ours, theirs = both_sides(local, name, recipe)
    sides = {
        "recipe": lambda: local.step_seconds([*ours, *count], args.warmup),
        "lines": lambda: local.step_seconds([*theirs, *count], args.warmup),
    }
    return paired(sides, args.pairs)


def reached(longer: Speedup) -> str:
    """Whether a ratio of times is 1 within noise, and the noise is within the limit."""
    if longer.low <= 1 <= longer.high:
        return "yes" if longer.low >= 1 - LIMIT and longer.high <= 1 + LIMIT else "too noisy to tell"
    return "NO"


def show(found: dict[str, dict[str, list[float]]]) -> None:
    """One row a form."""
    rows = []
    for name, seconds in found.items():
        longer = gain(seconds["lines"], seconds["recipe"])
        share = f"{longer.ratio - 1:+.2%} ({longer.low - 1:+.2%} to {longer.high - 1:+.2%})"
        times = f"{median(seconds['recipe']) * 1e3:.2f} → {median(seconds['lines']) * 1e3:.2f} ms"
        rows.append((name, times, share, reached(longer) if CASES[name].claimed else "not claimed"))
    table(("form", "a step, recipe → lines", "longer by (99 %)", "within noise and 5 %"), rows)


def forms(wanted: Sequence[str]) -> list[str]:
    """Those whose libraries are here."""
    missing = [name for name in wanted if name == "accelerate" and find_spec(name) is None]
    if missing:
        say("accelerate is not installed: its form is left out")
    return [name for name in wanted if name not in missing]


def main() -> None:
    """Compare each form, show the table and write the figures."""
    parser = options(__doc__)
    parser.add_argument("--forms", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--pairs", type=int, default=12, help="of jobs for each form (12)")
    parser.add_argument("--steps", type=int, default=120, help="timed in each job (120)")
    parser.add_argument("--warmup", type=int, default=10)
    args = parser.parse_args()
    if args.quick:
        args.pairs, args.steps = 2, 20
    found = {}
    with tempfile.TemporaryDirectory(prefix="own-code-") as folder:
        local = Local(Path(folder))
        recipe = make_recipe(local)
        for name in forms(args.forms):
            say(name)
            found[name] = compared(local, name, recipe, args)
            write_json(args.json, {"forms": found})
    show(found)


if __name__ == "__main__":
    main()
