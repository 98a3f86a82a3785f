"""What a new setting costs its author: a copy of the package gets a toy of each kind, and then tunes with it."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from launchers import AUTODDP, PATIENCE, ROOT, SCRIPTS, environment, run_python, start

from autoddp.knobs.hook import HOOKS

RUNG = {
    "knobs/base.py": [
        ('    BATCH = "batch"', '    TOY = "toy"\n    """For this test."""\n    BATCH = "batch"'),
        (
            "    Rung.BATCH: _RungFacts(",
            '    Rung.TOY: _RungFacts("nothing: a toy", limit=0.5),\n    Rung.BATCH: _RungFacts(',
        ),
    ],
}
HOOK = {
    "knobs/hook.py": [
        (
            "\nHOOKS = (\n",
            "\nHOOKS = (\n"
            '    CommHook("toy", Rung.TOY, "plays", ("whole", "quarter"), share=1.0, predicted_as="16 bits"),\n',
        )
    ],
    "worker/hooks/toy.py": [
        (
            "",
            "from autoddp.worker.hooks.all_reduce import all_reduce, when_reduced\n\n\n"
            "class State:\n"
            "    def __init__(self, group):\n"
            "        self.group, self.all_reduce = group, all_reduce\n\n\n"
            "def hook(state, bucket):\n"
            "    share = bucket.buffer().div_(state.group.size())\n"
            "    return when_reduced(state.all_reduce(share, state.group), lambda mean: mean)\n\n\n"
            "def toy(_configuration, group, _start):\n"
            "    return State(group), hook\n",
        )
    ],
    "worker/hooks/__init__.py": [
        ("_MAKE: ", "from autoddp.worker.hooks.toy import toy\n\n_MAKE: "),
        ('"powersgd": powersgd}', '"powersgd": powersgd, "toy": toy}'),
    ],
}
VARIABLE = {
    "knobs/env.py": [
        (
            "START_KNOBS: ",
            'TOY = _start("toy", "GLOO_TOY", "plays", one_of("on", "off"), _where(lambda _around: True, "on"))\n\n'
            "START_KNOBS: ",
        ),
        ("    ALLOCATOR,\n    MALLOC,", "    TOY,\n    ALLOCATOR,\n    MALLOC,"),
    ],
}

CAUSE = {
    "diagnose/causes/toy.py": [
        (
            "",
            '"""A toy."""\n\n'
            "from autoddp.diagnose.cause import Cause, Suspicion\n\n\n"
            "class Toy(Cause):\n"
            "    in_words = 'playing'\n\n"
            "    def suspect(self, evidence, around):\n"
            "        yield Suspicion(self.name, (0,), 1e3, 'it plays', None, 'it is a toy', fix='put it away')\n\n\n"
            "CAUSE = Toy()\n",
        )
    ],
}


def add(package: Path, changes: dict[str, list[tuple[str, str]]]) -> None:
    """Make these changes: (what is there, what stands there then), in each file."""
    for name, pairs in changes.items():
        path = package / name
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for old, new in pairs:
            assert text.count(old) == 1 or not old, f"{name}: {old!r}"
            text = text.replace(old, new, 1) if old else new
        path.write_text(text, encoding="utf-8")


def test_an_addition_touches_few_files() -> None:
    assert len(HOOK) <= 3
    assert len(VARIABLE) <= 1
    assert len(CAUSE) <= 1
    assert len(RUNG.keys() | HOOK.keys()) - len(HOOK) <= 3  # a rung, beside the hook that stands on it


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy with all four. It is compiled once."""
    package = tmp_path_factory.mktemp("copy") / "autoddp"
    shutil.copytree(ROOT / "autoddp", package, ignore=shutil.ignore_patterns("__pycache__"))
    for changes in (RUNG, HOOK, VARIABLE, CAUSE):
        add(package, changes)
    return package


def run(package: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Python in a folder, with that copy."""
    finished = run_python(words, cwd=folder, env={**environment(), "PYTHONPATH": str(package.parent)})
    assert finished.returncode == 0, finished.stderr
    return finished


@pytest.fixture(scope="module")
def printed(package: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each of `PROGRAMS` prints, in one Python."""
    words = ["-c", RUNS_EACH, json.dumps(PROGRAMS)]
    found: dict[str, str] = json.loads(run(package, tmp_path_factory.mktemp("programs"), *words).stdout)
    return found


RUNS_EACH = """
import contextlib, io, json, sys
found = {}
for name, code in json.loads(sys.argv[1]).items():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {"__name__": name})
    found[name] = out.getvalue()
print(json.dumps(found))
"""
PROGRAMS = {
    "variable": (
        "from autoddp.knobs import Configuration\n"
        "from autoddp.knobs.env import NodeAndJob, start_settings\n"
        "from autoddp.recipe.env import ENV_ALLOWED\n"
        "setting = start_settings(NodeAndJob(None, nodes=1, environment={}))[0]\n"
        "rule = ENV_ALLOWED['GLOO_TOY']\n"
        "print(setting, Configuration(setting).start_variables, rule('on'), rule('other'))\n"
    ),
    "hook": (
        "import torch\n"
        "from autoddp.cli.predict import _hook\n"
        "from autoddp.knobs import Configuration\n"
        "from autoddp.predict.step import coefficients_of\n"
        "from autoddp.worker.bench.hook_cost import TIMED, HookCosts\n"
        "toy = Configuration(_hook('toy'))\n"
        "assert 'rounding' in coefficients_of(toy)\n"
        "assert ('toy', 0) in TIMED\n"
        "print(*toy.in_words, all(HookCosts(torch.device('cpu')).run('toy', 0, 8, 1, 1)))\n"
    ),
    "cause": (
        "import json, sys\n"
        f"sys.path[:0] = {[str(ROOT / 'tests' / folder) for folder in ('diagnose', 'study')]!r}\n"
        "from slow_job import Failed, Over, SlowJob\n"
        "from autoddp.diagnose import Examination, Surroundings\n"
        "from autoddp.diagnose.causes import in_words\n"
        "job = SlowJob()\n"
        "found = Examination(job, Surroundings(job.facts), 90.0, Failed, Over).run().plain()['findings']\n"
        "print(json.dumps([in_words('toy'), *(one for one in found if one['cause'] == 'toy')]))\n"
    ),
}


def tried(package: Path, folder: Path, trials: int) -> tuple[list[dict[str, object]], set[str]]:
    """Configurations that a study has measured, and the rungs of its ladder."""
    words = ["--nproc-per-node", "2", "--tune-only", "--trials", str(trials), "--allow", "toy"]
    words += ["--diagnose-budget", "0"]
    words += [str(SCRIPTS / "plain.py"), "--steps", "100000"]
    # With more cores than ranks, a trial would go to a number of threads.
    launch = start(AUTODDP, folder, words, {"PYTHONPATH": str(package.parent), "OMP_NUM_THREADS": "1"}).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    summary = json.loads(next(folder.glob(".autoddp/2*/summary.json")).read_text())
    measured = [trial["configuration"] for trial in summary["trials"] if trial["state"] == "measured"]
    return measured, {entry["rung"] for entry in summary["ladder"]}


def test_a_study_tries_a_toy_hook_on_a_toy_rung(package: Path, tmp_path: Path) -> None:
    measured, rungs = tried(package, tmp_path, trials=4)
    assert any(values.get("hook") == "toy" for values in measured)
    assert "toy" in rungs


def test_a_toy_hook_is_predicted_timed_and_named(printed: dict[str, str]) -> None:
    assert printed["hook"] == "gradients sent in toy True\n"


def test_no_other_file_names_a_hook() -> None:
    """What others have to know of a hook is a property of its entry in `HOOKS`."""
    home = {"knobs/hook.py", *(f"worker/hooks/{path.name}" for path in (ROOT / "autoddp/worker/hooks").glob("*.py"))}
    home -= {"worker/hooks/arithmetic.py", "worker/hooks/by_itself.py"}  # of all hooks
    names = {hook.name for hook in HOOKS}
    found = []
    for path in sorted((ROOT / "autoddp").rglob("*.py")):
        file = path.relative_to(ROOT / "autoddp").as_posix()
        texts = {one.value for one in ast.walk(ast.parse(path.read_bytes())) if isinstance(one, ast.Constant)}
        found += [f"{file} names {name}" for name in sorted(names & texts) if file not in home]
    assert found == []


def test_a_toy_variable_is_offered_and_a_recipe_may_carry_it(printed: dict[str, str]) -> None:
    assert printed["variable"].startswith("{'toy': 'on'} {'GLOO_TOY': 'on'} None must be one of")


def test_a_diagnosis_suspects_a_toy_cause_and_says_what_mends_it(printed: dict[str, str]) -> None:
    """Of a job of arithmetic; what `autoddp diagnose` shows of any cause is a matter of tests/cli/test_diagnose.py."""
    in_words, found = json.loads(printed["cause"])
    assert in_words == "playing"
    assert (found["status"], found["fix"]) == ("suspected", "put it away")
    assert found["text"] == "it plays; not proved: it is a toy"


@pytest.mark.whole
@pytest.mark.timeout(2 * PATIENCE)
def test_a_study_tries_a_toy_variable(package: Path, tmp_path: Path) -> None:
    measured, _ = tried(package, tmp_path, trials=10)
    assert any(values.get("toy") == "on" for values in measured)
