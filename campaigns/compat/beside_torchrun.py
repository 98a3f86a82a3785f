"""One script: by torchrun, tuned by autoddp, and launched by autoddp, in the same folder; and what came of it.

result = run(load()["hydra_app"])
result.problems  # empty if the row is good
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

import torch
from launchers import ROOT
from traces.room import Finished, Room, may_have_own_tmp
from traces.snapshot import difference
from traces.tuned import AUTODDP, LATE, TORCHRUN

from autoddp.knobs import KNOBS, Rung
from autoddp.recipe import dump
from autoddp.recipe import load as load_recipe
from compat import nms_schema
from compat.case import Case

TRIALS = 4
BUDGET = "5m"
"""Of a study: it ends before the patience with one launcher does."""
KEEP = ("work", "home")
"""Parts of the room in which the user's files are: both launchers find those of the earlier job there."""
ROUNDING = 1e-5
"""Relative, of all parameters: additions in another order."""
REORDER = {"defer_reductions", "threads"}
"""Knobs of the exact rung that change the order of additions of two ranks."""
PATIENCE = 400.0  # seconds for one launcher
# Dates, times, process ids after a time (TensorBoard's), digests of what a cache holds: no two runs have the same.
_NEVER_SAME = re.compile(
    r"[0-9a-f]{16,}|\d{4}-\d{2}-\d{2}|\d{2}-\d{2}-\d{2}|\d{8}[-_]\d{6}|\d{9,}(\.[\w-]+\.\d+)?|[A-Z][a-z]{2}\d{2}_"
)


@dataclass
class Result:
    """What came of one script."""

    name: str
    when: str = ""
    skipped: str = ""
    """Why it was not run."""
    tuned: bool = False
    why: str = ""
    """Of a script that is not tuned: autoddp's line."""
    settings: str = ""
    """What the real job was launched with."""
    by_hand: bool = False
    """Whether no gain was certain, so that the ladder's best exact settings were put into the recipe."""
    parameters: str = "not compared"
    starts: int = 0
    seconds: float = 0.0
    trials: int = 0
    problems: list[str] = field(default_factory=list)
    kept: str = ""
    """The folder with the outputs of a bad row."""

    @property
    def is_bad(self) -> bool:
        return bool(self.problems)


def run(case: Case) -> Result:
    """One script, from nothing to its row."""
    result = Result(case.name, when=date.today().isoformat(), skipped=case.missing())
    if result.skipped:
        _say(case, f"skipped: {result.skipped}")
        return result
    outputs: dict[str, str] = {}
    folder = tempfile.TemporaryDirectory(prefix="compat-", dir="/var/tmp")
    with Room(private=may_have_own_tmp()) as room, folder as aside:
        if nms_schema.is_needed():
            nms_schema.announce(room.out / "site")
        room.settle()
        try:
            _run(case, room, Path(aside), result, outputs)
        except _Stopped as stopped:
            result.problems.append(str(stopped))
        if result.is_bad:
            result.kept = _keep(case, room, outputs)
    _say(case, f"BAD: {'; '.join(result.problems)[:600]}" if result.is_bad else f"good: {result.parameters}")
    return result


class _Stopped(Exception):
    """There is nothing to compare."""


def _run(case: Case, room: Room, aside: Path, result: Result, outputs: dict[str, str]) -> None:
    final, recipe = room.out / "final", room.out / "recipe.toml"
    env = _environment(room, final)

    def start(what: str, launcher: Sequence[str], options: Sequence[str] = (), **more: str) -> Finished:
        _fresh(final)
        began = time.monotonic()
        command = [*launcher, "--nproc-per-node", str(case.ranks), *options, *case.command]
        finished = room.run(command, {**env, **more}, PATIENCE)
        outputs[what] = f"$ {' '.join(command)}\n{finished.output}\nexit code {finished.returncode}\n"
        took = time.monotonic() - began
        _say(case, f"{what}: {took:.0f} s, exit code {finished.returncode}")
        if finished.timed_out:
            raise _Stopped(f"{what} has not ended after {PATIENCE:.0f} s")
        if what == "tuning":
            result.seconds = took
        return finished

    if case.earlier and start("earlier job", TORCHRUN, COMPAT_EARLIER="1").returncode != 0:
        raise _Stopped("the earlier job fails under torchrun")
    for part in KEEP:
        shutil.copytree(room.part(part), aside / part, symlinks=True)
    if start("torchrun", TORCHRUN).returncode != 0:
        raise _Stopped("fails under torchrun")
    expected, names = _parameters(final), _names(room)

    _restore(room, aside)
    before = room.look()
    own = ["--output", str(room.out / "runs"), "--recipe", str(recipe)]
    study = ["--trials", str(TRIALS), "--allow", "exact", "--budget", BUDGET, *own]
    tuning = start("tuning", AUTODDP, ["--tune-only", *study])
    time.sleep(LATE)  # what the script has left running may still write
    result.problems += [f"tuning has changed {line}" for line in difference(before, room.look())]
    result.problems += [f"tuning has left the parameters {name}" for name in _parameters(final)]
    result.tuned = recipe.exists()
    _cost(room.out / "runs", result)
    if result.tuned is (tuning.returncode != 0):
        result.problems.append(f"tuning ended with exit code {tuning.returncode}")
    knobs = _choose_settings(recipe, result) if result.tuned else set()

    launched = start("autoddp", AUTODDP, ["--recipe", str(recipe)] if result.tuned else study)
    if launched.returncode != 0:
        result.problems.append(f"the real job has ended with exit code {launched.returncode}, torchrun with 0")
    if not result.tuned:
        result.why = _why(launched.output, case.why_as_written)
    if result.tuned is bool(case.why_as_written) or (case.why_as_written and not result.why):
        result.problems.append(
            f"expected {case.expected}, but autoddp said: {_said(tuning.output if result.tuned else launched.output)}"
        )
    result.problems += other_names(names, _names(room))
    compare(expected, _parameters(final), knobs, result)


def _environment(room: Room, final: Path) -> dict[str, str]:
    temporary = {} if room.private else {"TMPDIR": str(room.part("tmp"))}
    return {
        **temporary,
        "PYTHONPATH": os.pathsep.join(
            map(str, (ROOT / "campaigns" / "compat", room.out / "site", ROOT, ROOT / "campaigns", ROOT / "tests"))
        ),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # for --no-python
        "COMPAT_OUT": str(final),
        "HF_HUB_OFFLINE": "1",
    }


def _fresh(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def _restore(room: Room, aside: Path) -> None:
    """The files that were there before torchrun's job, under the same names; nothing in the temporary folders."""
    for part in ("work", "home", "tmp", "elsewhere", "shm"):
        for path in room.part(part).iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for part in KEEP:
        shutil.copytree(aside / part, room.part(part), symlinks=True, dirs_exist_ok=True)


def _parameters(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.name: torch.load(path) for path in sorted(folder.glob("rank*.pt"))}


def _names(room: Room) -> set[str]:
    """What the user has afterwards."""
    found = [str(path.relative_to(room.base)) for part in KEEP for path in room.part(part).rglob("*")]
    return set(map(never_same, found))


def never_same(name: str) -> str:
    """A name with a word in the place of what no two runs have the same."""
    return _NEVER_SAME.sub("<any>", name)


def other_names(expected: set[str], found: set[str]) -> list[str]:
    missing, more = sorted(expected - found), sorted(found - expected)
    return [f"the real job has not written {name}" for name in missing] + [
        f"the real job has written {name}, torchrun's has not" for name in more
    ]


def _cost(runs: Path, result: Result) -> None:
    for folder in runs.glob("*"):
        result.starts = len(list(folder.glob("attempt*")))
        if (folder / "summary.json").exists():
            trials = json.loads((folder / "summary.json").read_text())["trials"]
            result.trials = sum(trial["state"] in ("measured", "cut short") for trial in trials)


def _choose_settings(path: Path, result: Result) -> set[str]:
    """The knobs of the recipe. One without any gets the best exact configuration of its ladder, see the page."""
    recipe = load_recipe(path)
    best = next((entry.configuration for entry in recipe.ladder if entry.configuration.rung is Rung.EXACT), None)
    result.by_hand = not recipe.configuration and not recipe.env and best is not None
    if result.by_hand:
        recipe = replace(recipe, configuration=best.without_variables, env=best.variables)
        path.write_text(dump(recipe))
    variables = [f"{name}={value}" for name, value in recipe.env.items()]
    result.settings = " ".join(filter(None, [str(recipe.configuration) if recipe.configuration else "", *variables]))
    return {*recipe.configuration, *(knob.name for knob in KNOBS if knob.variable in recipe.env)}


def compare(
    expected: Mapping[str, Mapping[str, torch.Tensor]],
    found: Mapping[str, Mapping[str, torch.Tensor]],
    knobs: Iterable[str],
    result: Result,
) -> None:
    if expected.keys() != found.keys():
        result.problems.append(f"torchrun's job leaves {sorted(expected)}, the real one {sorted(found)}")
    elif expected:
        apart = max(_distance(expected[name], found[name]) for name in expected)
        result.parameters = "same bits" if apart == 0 else f"within {apart:.1e}"
        if apart > (ROUNDING if REORDER & {*knobs} else 0):
            result.problems.append(f"the parameters differ from torchrun's by {apart:.1e}, under {result.settings}")


def _distance(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Relative, over all; 0 only where all bits are the same; infinite for other names, shapes or types."""
    pairs = [(one[name], other[name]) for name in one if name in other]
    if one.keys() != other.keys() or any(a.shape != b.shape or a.dtype != b.dtype for a, b in pairs):
        return float("inf")
    if all(torch.equal(a, b) for a, b in pairs):
        return 0.0
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    whole = sum(float(a.double().square().sum()) for a, _ in pairs)
    distance = (apart / whole) ** 0.5 if whole else float("inf")
    return distance if distance > 0 else float("inf")  # also where one is not a number


def _lines(output: str) -> list[str]:
    """What autoddp has said, without its name in front."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    return [line[len("autoddp: ") :] for line in plain.splitlines() if line.startswith("autoddp: ")]


def _why(output: str, pattern: str) -> str:
    """The line that says why a script is launched as it is written."""
    lines = _lines(output)
    matching = [line for line in lines if pattern and re.search(pattern, line)]
    return matching[0] if matching else ""


def _said(output: str) -> str:
    telling = [line for line in _lines(output) if line.startswith(("recipe written", "warning", "error"))]
    return " / ".join(telling or _lines(output)[-1:]) or f"nothing; the output ends with {output[-300:]!r}"


def _keep(case: Case, room: Room, outputs: Mapping[str, str]) -> str:
    folder = Path(tempfile.mkdtemp(prefix=f"compat-{case.name}-", dir="/var/tmp"))
    for what, text in outputs.items():
        (folder / f"{what}.txt").write_text(text)
    shutil.copytree(room.out, folder / "out", symlinks=True)
    shutil.copytree(room.work, folder / "work", symlinks=True)
    return str(folder)


def _say(case: Case, text: str) -> None:
    print(f"  {time.strftime('%H:%M:%S')} {case.name}: {text}", file=sys.stderr, flush=True)
