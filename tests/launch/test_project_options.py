"""`[tool.autoddp]` of a project: it can only narrow what may be launched, and names no files."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoddp.cli.main import with_project
from autoddp.commandline.mode import choose
from autoddp.commandline.options import Options
from autoddp.commandline.words import parse
from autoddp.errors import UsageError
from autoddp.knobs import Rung

SCRIPT = ["--nproc-per-node", "2", "train.py"]


@pytest.fixture(autouse=True)
def below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder below the project's."""
    folder = tmp_path / "project" / "jobs"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("AUTODDP_VERBOSE", raising=False)
    Path("train.py").write_text("")
    return folder


def understood(table: str, *words: str, folder: str = "..") -> Options:
    Path(folder, "pyproject.toml").write_text(table)
    return with_project(parse([*words, *SCRIPT]))


TABLE = """
[project]
name = "digits"
[tool.autoddp]
allow = "exact"
budget = "10m"
seed = 7
trials = 40
trace = true
verbose = true
"""


def test_it_is_read_from_the_current_folder_upwards(monkeypatch: pytest.MonkeyPatch) -> None:
    found = understood(TABLE)
    assert (found.allow, found.budget, found.seed, found.study.trials) == (Rung.EXACT, 600.0, 7, 40)
    assert found.trace
    assert found.verbose
    line = "--allow exact --budget 10m --seed 7 --trials 40 --trace (from ../pyproject.toml)"
    assert found.says == (line,)
    assert understood("[project]\nname = 'autoddp'\n", folder=".").seed == 7  # one without such a table is passed by


def test_environment_and_command_line_overrule_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTODDP_SEED", "8")
    monkeypatch.setenv("AUTODDP_BUDGET", "3m")
    found = understood(TABLE, "--allow", "lossy", "--budget", "2m", "--trials", "5")
    assert (found.allow, found.budget, found.seed, found.study.trials) == (Rung.LOSSY, 120.0, 8, 5)
    assert found.says == ("--trace (from ../pyproject.toml), --seed 8 (from the environment)",)


def test_its_number_of_trials_does_not_tune_again() -> None:
    """What --trials on the command line does, though there is a recipe."""
    found = understood(TABLE)
    assert found.trials is None
    assert choose(found).tune


def test_torchrun_is_torchrun() -> None:
    found = understood("[tool.autoddp", "--trials", "0")
    assert found.says == ()


def test_near_is_allowed_anyway() -> None:
    """As an option it would launch more of a saved recipe that was made under --allow exact."""
    assert understood('[tool.autoddp]\nallow = "near"').allow is None


BAD = {
    'allow = "lossy"': '[tool.autoddp] allow = "lossy": a project can only narrow what may be launched',
    "near-limit = 0.5": "[tool.autoddp] near-limit = 0.5: more than 0.02; a project can only narrow",
    "lossy-limit = 1": "[tool.autoddp] lossy-limit = 1: more than 0.95",
    'alow = "exact"': "[tool.autoddp] alow: no option of autoddp (did you mean 'allow'?)",
    'near_limit = "0.01"': "[tool.autoddp] near_limit: no option of autoddp (did you mean 'near-limit'?)",
    'allow = "nearly"': "[tool.autoddp] allow: --allow: invalid choice: 'nearly'",
    "budget = [3]": "[tool.autoddp] budget = [3]: must be a value as of --budget on the command line",
    'budget = "-3"': "[tool.autoddp] budget: --budget '-3': must be a duration above 0, e.g. --budget 5m",
    "seed = true": "[tool.autoddp] seed = True: must be a value as of --seed on the command line",
    'trace = "yes"': "[tool.autoddp] trace = 'yes': must be true or false",
    "trials = 0": "[tool.autoddp] trials = 0: must be 1 or more; --trials 0 on the command line is torchrun",
    "[tool.autoddp": "not TOML: ",
    "x = \xff": "not TOML: ",
}


@pytest.mark.parametrize("line", BAD)
def test_a_table_that_cannot_be(line: str) -> None:
    Path("../pyproject.toml").write_text(f"[tool.autoddp]\n{line}", encoding="latin-1")
    with pytest.raises(UsageError, match=r"^[^\n]+$") as caught:
        with_project(parse(SCRIPT))
    assert str(caught.value).startswith(f"../pyproject.toml: {BAD[line]}")


HARMFUL = (
    "accumulate-up-to cuda-graphs dry-run force fresh isolation job-steps keep-runs local-buffers no-orphans output "
    "recipe recompile scratch-limit static-graph tune-only watch"
)


@pytest.mark.parametrize("option", HARMFUL.split())
def test_what_only_the_user_may_set(option: str) -> None:
    with pytest.raises(UsageError, match=rf"{option}: not for a project to set; give --{option} on the command line"):
        understood(f"[tool.autoddp]\n{option} = true")


def test_a_table_that_is_none() -> None:
    with pytest.raises(UsageError, match=r"tool\.autoddp must be a table"):
        understood("tool.autoddp = 3")


def test_a_removed_current_folder(below: Path) -> None:
    options = parse(SCRIPT)
    (below / "train.py").unlink()
    below.rmdir()
    assert with_project(options).says == ()
