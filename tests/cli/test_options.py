"""The command line: whatever torchrun's own parser understands is understood alike, and ours stands beside it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from autoddp.errors import UsageError
from autoddp.isolation import Level
from autoddp.knobs import Rung
from autoddp.launch.options import help_text, own_parser, parse
from autoddp.units import Allowance

SCRIPT = ["train.py", "--lr", "0.1", "--", "x"]
ACTIONS = [action for action in get_args_parser()._actions if action.option_strings and action.dest != "help"]
SPELLINGS = [(action, option) for action in ACTIONS for option in action.option_strings]
OWN = [option for action in own_parser()._actions for option in action.option_strings]


def value_for(action: argparse.Action) -> list[str]:
    """A value that differs from the default; none for a switch."""
    if action.nargs == 0:
        return []
    return [list(action.choices)[-1] if action.choices else {int: "3", float: "0.5"}.get(action.type, "1,2")]


def understood_alike(words: list[str]) -> argparse.Namespace:
    torchrun = get_args_parser().parse_args(words)
    assert parse(words).torchrun == torchrun
    return torchrun


@pytest.mark.parametrize(("action", "option"), SPELLINGS, ids=[option for _, option in SPELLINGS])
def test_every_option_of_torchrun(action: argparse.Action, option: str) -> None:
    value = value_for(action)
    found = understood_alike([option, *value, *SCRIPT])
    assert getattr(found, action.dest) != action.default
    if value and option.startswith("--"):
        assert understood_alike([f"{option}={value[0]}", *SCRIPT]) == found


@pytest.mark.parametrize("action", ACTIONS, ids=[action.dest for action in ACTIONS])
def test_every_variable_of_torchrun(action: argparse.Action, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"PET_{action.dest.upper()}", (value_for(action) or ["1"])[0])
    understood_alike(SCRIPT)


def test_variables_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "4")
    monkeypatch.setenv("PET_STANDALONE", "1")
    found = parse(SCRIPT).torchrun
    assert (found.nproc_per_node, found.standalone) == ("4", True)


@pytest.mark.parametrize(
    "words",
    [
        ["train.py"],
        ["--", "train.py", "--lr", "1"],
        ["train.py", "--", "--lr", "1"],
        ["train.py", "a", "--", "--lr", "1", "--", "b"],
        ["train.py", "--nproc-per-node", "5", "-m", ""],
        ["--stand", "--nproc_per", "2", "train.py"],
        ["-m", "package.train", "-m", "x"],
        ["--", "--trials", "train.py"],  # a script of that name
    ],
    ids=" ".join,
)
def test_words_that_are_none_of_ours(words: list[str]) -> None:
    understood_alike(words)
    assert parse(words).taken == ()


def test_own_options_before_the_script() -> None:
    values = "--trials 7 --recipe r.toml --nnodes 2 --allow exact --budget 1h30m --seed 3 --output out"
    found = parse([*values.split(), "--tune-only", "--dry-run", "--force", "--fresh", "train.py", "--trails"])
    assert (found.trials, found.recipe, found.allow, found.budget) == (7, Path("r.toml"), Rung.EXACT, 5400.0)
    assert (found.seed, found.output, found.tune_only, found.dry_run, found.force) == (3, Path("out"), True, True, True)
    assert found.fresh
    assert (found.torchrun.nnodes, found.torchrun.training_script_args, found.taken) == ("2", ["--trails"], ())


def test_defaults() -> None:
    found = parse(["train.py"])
    assert (found.trials, found.recipe, found.allow, found.budget, found.seed) == (None, None, None, None, 0)
    assert (found.tune_only, found.dry_run, found.force, found.output) == (False, False, False, Path(".autoddp"))
    assert (found.keep_runs, found.isolation, found.scratch_limit) == (20, None, None)
    assert found.recipe_path == Path(f"{Path.cwd().name}.train.autoddp.toml")
    assert found.older_recipe_path == Path("train.autoddp.toml")
    assert parse(["-m", "package.train"]).recipe_path == Path("package.train.autoddp.toml")
    assert parse(["--no-python", "bash", "run.sh"]).recipe_path == Path("bash.autoddp.toml")
    assert parse(["../some/where/train.py"]).recipe_path == Path("where.train.autoddp.toml")
    assert parse([f"{'x' * 250}/train.py"]).recipe_path == Path("train.autoddp.toml")
    assert parse(["--recipe", "a/b.toml", "train.py"]).recipe_path == Path("a/b.toml")


def test_the_isolation_and_its_limits() -> None:
    found = parse(["--keep-runs", "3", "--isolation", "guard", "--scratch-limit", "20G", "train.py"])
    assert (found.keep_runs, found.isolation, found.scratch_limit) == (3, Level.GUARD, Allowance(size=20 * 2**30))
    found = parse(["train.py", "--isolation=off", "--scratch-limit", "12.5%"])
    assert (found.isolation, found.scratch_limit) == (Level.OFF, Allowance(share=0.125))
    assert parse(["--isolation", "overlay", "train.py"]).isolation is Level.OVERLAY


AFTER = [
    # words, what is taken, what the script gets
    ("train.py --trials 4", "--trials 4", ""),
    ("train.py --lr 1 --trials=4 x", "--trials=4", "--lr 1 x"),
    ("train.py a --allow exact b --tune-only c", "--allow exact --tune-only", "a b c"),
    ("--seed 1 train.py --trials 4", "--trials 4", ""),
    ("train.py --trials 4 -- --lr 1", "--trials 4", "--lr 1"),
    ("train.py --trials 4 a -- --trials 5", "--trials 4", "a --trials 5"),
    ("train.py -- --trials 5", "", "--trials 5"),
    ("--trials 4 train.py -- --trials 5", "", "--trials 5"),
    ("train.py a -- --trials 5", "", "a --trials 5"),
    ("--trials 4 -- train.py --trials 5", "", "--trials 5"),
    ("--trials 4 train.py a -- b", "", "a -- b"),  # a `--` that shields nothing of ours is the script's
]


@pytest.mark.parametrize(("words", "taken", "script"), AFTER, ids=[words for words, _, _ in AFTER])
def test_own_options_after_the_script(words: str, taken: str, script: str) -> None:
    found = parse(words.split())
    assert " ".join(found.taken) == taken
    assert " ".join(found.torchrun.training_script_args) == script
    assert found.torchrun.training_script == "train.py"


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text('import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument("--seed", type=int)\n')
    return str(path)


@pytest.mark.parametrize("end", [[], ["--", "x"]], ids=["", "--"])
@pytest.mark.parametrize("words", [["--seed", "3"], ["--seed=3"]], ids=" ".join)
def test_an_option_of_both_after_the_script(script: str, words: list[str], end: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse([script, *words, *end])
    assert str(caught.value) == (
        f"--seed: both autoddp and {script} have this option; for autoddp write it before the script "
        f"(autoddp {words[0]} … {script}), for the script after -- ({script} -- {words[0]} …)"
    )


def test_an_option_of_both_as_the_error_says(script: str) -> None:
    ours, theirs = parse(["--seed", "3", script]), parse([script, "--", "--seed", "3"])
    assert (ours.seed, ours.torchrun.training_script_args) == (3, [])
    assert (theirs.seed, theirs.torchrun.training_script_args) == (0, ["--seed", "3"])
    assert parse([script, "--trials", "4"]).taken == ("--trials", "4")  # the script has no --trials


def test_an_option_of_both_in_a_module(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(script).parent))
    Path(script).rename(Path(script).with_name("module_with_a_seed.py"))
    with pytest.raises(UsageError, match="both autoddp and module_with_a_seed have this option"):
        parse(["-m", "module_with_a_seed", "--seed", "3"])


def test_no_option_means_two_things() -> None:
    assert set(OWN) & {option for action in ACTIONS for option in action.option_strings} == set()


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_text()
    missing = [option for option in [*OWN, *(option for _, option in SPELLINGS)] if option not in text]
    assert missing == []
    for words in (["--help"], ["--nproc-per-node", "2", "--trials", "3", "-h"]):
        with pytest.raises(SystemExit) as ended:
            parse(words)
        assert ended.value.code == 0
        assert capsys.readouterr().out == text
    assert parse(["train.py", "--help"]).torchrun.training_script_args == ["--help"]


BAD = [
    ("", "no script given: autoddp [options] train.py [its arguments]; autoddp --help lists all"),
    ("--trials 4", "no script given: autoddp [options] train.py [its arguments]; autoddp --help lists all"),
    ("--trails 4 t.py", "unknown option --trails (did you mean '--trials'?); autoddp --help lists all"),
    ("--nproc-pre-node 4 t.py", "unknown option --nproc-pre-node (did you mean '--nproc-per-node'?); autoddp"),
    ("--zzz t.py", "unknown option --zzz; autoddp --help lists all"),
    ("--tri 4 t.py", "unknown option --tri (did you mean '--trials'?)"),
    ("--trials x t.py", "--trials 'x': must be a whole number of 0 or more, e.g. --trials 20"),
    ("--trials -3 t.py", "--trials '-3': must be a whole number of 0 or more, e.g. --trials 20"),
    ("--trials= t.py", "--trials '': must be a whole number of 0 or more, e.g. --trials 20"),
    ("t.py --trials", "--trials: needs a value: a whole number of 0 or more, e.g. --trials 20"),
    ("--recipe --trials 4 t.py", "--recipe: needs a value: --recipe VALUE"),
    ("--seed -1 t.py", "--seed '-1': must be a whole number from 0 to 4294967295, e.g. --seed 0"),
    ("--near-limit 0 t.py", "--near-limit '0': must be a share above 0, e.g. --near-limit 0.02"),
    ("--lossy-limit much t.py", "--lossy-limit 'much': must be a share above 0, e.g. --lossy-limit 0.95"),
    ("--accumulate-up-to 0 t.py", "--accumulate-up-to '0': must be a whole number of 1 or more, e.g. --accumulate"),
    ("--allow batch t.py", "--allow: invalid choice: 'batch' (choose from "),
    ("--budget 5x t.py", "--budget '5x': must be a duration, e.g. --budget 5m"),
    ("--allow all t.py", "--allow: invalid choice: 'all' (choose from "),
    ("--keep-runs 0 t.py", "--keep-runs '0': must be a whole number of 1 or more, e.g. --keep-runs 20"),
    ("--keep-runs many t.py", "--keep-runs 'many': must be a whole number of 1 or more, e.g. --keep-runs 20"),
    ("--isolation full t.py", "--isolation 'full': must be overlay, guard or off, e.g. --isolation guard"),
    ("t.py --isolation", "--isolation: needs a value: overlay, guard or off, e.g. --isolation guard"),
    ("--scratch-limit 0 t.py", "--scratch-limit '0': must be a size such as 20G, or a share such as 20%, e.g. --scr"),
    ("--scratch-limit 0% t.py", "--scratch-limit '0%': must be a size such as 20G, or a share such as 20%, e.g. --s"),
    ("--scratch-limit 101% t.py", "--scratch-limit '101%': must be a size such as 20G, or a share such as 20%, e.g."),
    ("--scratch-limit -5 t.py", "--scratch-limit '-5': must be a size such as 20G, or a share such as 20%, e.g. --s"),
    ("--max-restarts x t.py", "--max-restarts/--max_restarts: invalid int value: 'x'"),
    ("--nnodes", "--nnodes: expected one argument"),
]


@pytest.mark.parametrize(("words", "line"), BAD, ids=[words for words, _ in BAD])
def test_a_command_line_that_cannot_be(words: str, line: str) -> None:
    with pytest.raises(UsageError, match=r"^[^\n]+$") as caught:
        parse(words.split())
    assert str(caught.value).startswith(line)
