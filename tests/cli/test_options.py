"""The command line: whatever torchrun's own parser understands is understood alike, and ours stands beside it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from autoddp.commandline.options import Options
from autoddp.commandline.parsers import help_text, own_parser
from autoddp.commandline.script import COMMANDS
from autoddp.commandline.words import RESERVED, parse, parse_apart
from autoddp.errors import UsageError
from autoddp.isolation import Level
from autoddp.knobs import Rung
from autoddp.units import Allowance

SCRIPT = ["train.py", "--lr", "0.1", "--", "x"]
SAY_AND_END = ("help", "print_completion")  # the second since torch 2.15
ACTIONS = [one for one in get_args_parser()._actions if one.option_strings and one.dest not in SAY_AND_END]
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


def test_torchruns_own_completion(capsys: pytest.CaptureFixture[str]) -> None:
    if not any(action.dest == "print_completion" for action in get_args_parser()._actions):
        pytest.skip("torchrun prints a completion since torch 2.15")
    printed = []
    for read in (get_args_parser().parse_args, parse):
        with pytest.raises(SystemExit, match=r"^0$"):
            read(["--print-completion", "bash"])
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != ""


@pytest.mark.parametrize("action", ACTIONS, ids=[action.dest for action in ACTIONS])
def test_every_variable_of_torchrun(action: argparse.Action, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"PET_{action.dest.upper()}", (value_for(action) or ["1"])[0])
    understood_alike(SCRIPT)


def test_run_path_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torchrun's own rule. The script was looked for along PATH, and was not found."""
    monkeypatch.setenv("PET_NO_PYTHON", "1")
    words = ["--run-path", *SCRIPT]
    below_wrap = get_args_parser().parse_args(words)
    for found in (parse(words).torchrun, parse_apart([], below_wrap).torchrun):
        assert (found.run_path, found.no_python) == (True, False)
    assert parse(SCRIPT).torchrun.no_python


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
    found = parse(words)
    assert (found.trials, found.recipe) == (None, None)


@pytest.mark.parametrize(("name", "value"), [("PET_STANDALONE", "true"), ("PET_MODULE", ""), ("PET_RUN_PATH", "yes")])
def test_a_variable_of_torchruns_that_is_no_number(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NO_PYTHON", "0")
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"^{name}={value}: must be 1 or 0$"):
        parse(SCRIPT)


def test_own_options_before_the_script() -> None:
    values = "--trials 7 --recipe r.toml --nnodes 2 --allow exact --budget 1h30m --seed 3 --output out"
    found = parse([*values.split(), "--tune-only", "--dry-run", "--force", "--fresh", "train.py", "--trails"])
    assert (found.trials, found.recipe, found.allow, found.budget) == (7, Path("r.toml"), Rung.EXACT, 5400.0)
    assert (found.seed, found.output, found.tune_only, found.dry_run, found.force) == (3, Path("out"), True, True, True)
    assert found.fresh
    assert (found.torchrun.nnodes, found.torchrun.training_script_args, found.says) == ("2", ["--trails"], ())


def test_defaults() -> None:
    found = parse(["train.py"])
    assert (found.trials, found.recipe, found.allow, found.budget, found.seed) == (None, None, None, None, 0)
    assert (found.tune_only, found.dry_run, found.force, found.output) == (False, False, False, Path(".autoddp"))
    assert (found.keep_runs, found.isolation, found.scratch_limit) == (20, None, None)
    assert found.recipe_path == Path(f"{Path.cwd().name}.train.autoddp.toml")
    assert parse(["-m", "package.train"]).recipe_path == Path("package.train.autoddp.toml")
    assert parse(["--no-python", "bash", "run.sh"]).recipe_path == Path("bash.autoddp.toml")
    assert parse(["../some/where/train.py"]).recipe_path == Path("where.train.autoddp.toml")
    assert parse([f"{'x' * 250}/train.py"]).recipe_path == Path("train.autoddp.toml")
    assert parse(["--recipe", "a/b.toml", "train.py"]).recipe_path == Path("a/b.toml")


def test_the_isolation_and_its_limits() -> None:
    found = parse(["--keep-runs", "3", "--isolation", "guard", "--scratch-limit", "20G", "train.py"])
    assert (found.keep_runs, found.isolation, found.scratch_limit) == (3, Level.GUARD, Allowance(size=20 * 2**30))
    found = parse(["--isolation=off", "--scratch-limit", "12.5%", "train.py"])
    assert (found.isolation, found.scratch_limit) == (Level.OFF, Allowance(share=0.125))
    assert parse(["--isolation", "overlay", "train.py"]).isolation is Level.OVERLAY


LINES = {
    "taken": "{} is taken by autoddp; for {} put -- before the script",
    "declared": "{} is passed to {}, whose source has {}; for autoddp write it before the script",
    "unknown": "{} is passed to {}, whose options are not known; for autoddp write it before the script",
}
AFTER = [
    # words, autoddp's own of them, what the script gets, beginnings of the lines
    ("train.py --trials 4", "--trials 4", "", ["--trials 4 is taken by autoddp"]),
    ("train.py --lr 1 --trials=4 x", "--trials 4", "--lr 1 x", ["--trials=4 is taken by autoddp"]),
    ("train.py --recipe a/b.toml c", "--recipe a/b.toml", "c", ["--recipe a/b.toml is taken by autoddp"]),
    (
        "train.py --recipe=b.toml --trials 3",
        "--trials 3 --recipe b.toml",
        "",
        ["--recipe=b", "--trials 3 is taken by autoddp"],
    ),
    (
        "train.py --trials 4 --trials 5",
        "--trials 5",
        "",
        ["--trials 4 is taken by autoddp", "--trials 5 is taken by autoddp"],
    ),
    ("--trials 7 train.py --trials 5", "--trials 5", "", ["--trials 5 is taken by autoddp"]),
    ("train.py --trials 0 --recipe b.toml", "--trials 0 --recipe b.toml", "", ["--trials 0 is", "--recipe b.toml is"]),
    # not values of ours
    ("train.py --trials", "", "--trials", ["--trials is passed to train.py; for autoddp write it"]),
    ("train.py --trials=", "", "--trials=", ["--trials is passed to train.py; for"]),
    ("train.py --trials many", "", "--trials many", ["--trials is passed"]),
    ("train.py --trials -4", "", "--trials -4", ["--trials is passed"]),
    ("train.py --trials 4.5", "", "--trials 4.5", ["--trials is passed"]),
    ("train.py --trials --lr 1", "", "--trials --lr 1", ["--trials is passed"]),
    ("train.py --recipe x", "", "--recipe x", ["--recipe is passed"]),
    ("train.py --recipe --x.toml", "", "--recipe --x.toml", ["--recipe is passed"]),
    ("train.py --recipe cake.tomls", "", "--recipe cake.tomls", ["--recipe is passed"]),
    ("train.py --trial 4 -trials 4 trials 4", "", "--trial 4 -trials 4 trials 4", []),
    # all else is the script's
    (
        "train.py --seed 42 --lr 3 --output o",
        "",
        "--seed 42 --lr 3 --output o",
        ["--seed, --output are passed to train"],
    ),
    ("train.py --seed=1 --seed 2", "", "--seed=1 --seed 2", ["--seed is passed to train.py; for autoddp write it"]),
    ("train.py --nproc_per_node 4 -m x", "", "--nproc_per_node 4 -m x", ["--nproc_per_node is passed"]),
    ("train.py a --allow exact b --tune-only c", "", "a --allow exact b --tune-only c", ["--allow, --tune-only are"]),
    ("train.py --help -h --", "", "--help -h --", []),
    ("--seed 1 train.py --trials 4", "--trials 4 --seed 1", "", ["--trials 4 is taken by autoddp"]),
    # what -- shields; torchrun's parser swallows one that follows the script at once
    ("train.py --trials 4 -- --lr 1", "--trials 4", "--lr 1", ["--trials 4 is taken by autoddp"]),
    ("train.py --trials 4 a -- --trials 5", "--trials 4", "a -- --trials 5", ["--trials 4 is taken by autoddp"]),
    ("train.py -- --trials 5", "", "--trials 5", []),
    ("train.py a -- --trials 5 --seed 1", "", "a -- --trials 5 --seed 1", []),
    ("--trials 4 -- train.py --trials 5", "--trials 4", "--trials 5", []),
    ("--trials 4 train.py a -- b", "--trials 4", "a -- b", []),
    ("train.py --trials -- 4", "", "--trials -- 4", ["--trials is passed"]),
    # autoddp --trials 0 is torchrun
    ("--trials 0 train.py --trials 5 --recipe b.toml", "--trials 0", "--trials 5 --recipe b.toml", ["--trials, --rec"]),
    ("--trials 5 --trials=0 train.py --trials 5", "--trials 0", "--trials 5", ["--trials is passed"]),
    ("--trials 0 --trials 5 train.py --trials 6", "--trials 6", "", ["--trials 6 is taken by autoddp"]),
]


def own_words(found: Options) -> str:
    """What differs from the defaults, as words."""
    given = {"--trials": found.trials, "--recipe": found.recipe, "--seed": found.seed or None}
    return " ".join(f"{option} {value}" for option, value in given.items() if value is not None)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("import sys\nprint(sys.argv)\n")
    return path


@pytest.mark.parametrize(("words", "own", "scripts", "lines"), AFTER, ids=[words for words, *_ in AFTER])
def test_words_after_the_script(script: Path, words: str, own: str, scripts: str, lines: list[str]) -> None:
    found = parse(words.split())
    assert own_words(found) == own
    assert " ".join(found.torchrun.training_script_args) == scripts
    assert found.torchrun.training_script == "train.py"
    assert len(found.says) == len(lines)
    assert all(said.startswith(line) for said, line in zip(found.says, lines, strict=True)), found.says


@pytest.mark.parametrize("words", [["--trials", "3"], ["--trials=3"], ["--recipe", "r.toml"]], ids=" ".join)
def test_an_option_that_the_script_has_too(script: Path, words: list[str]) -> None:
    option = words[0].partition("=")[0]
    assert parse(["train.py", *words]).says == (LINES["taken"].format(" ".join(words), "train.py"),)
    script.write_text(f'import argparse\nargparse.ArgumentParser().add_argument("{option}")\n')
    found = parse(["train.py", *words])
    assert found.torchrun.training_script_args == words
    assert found.says == (LINES["declared"].format(" ".join(words), "train.py", option),)
    assert parse([*words, "train.py", *words]).torchrun.training_script_args == words
    assert parse(["-m", "train", *words]).torchrun.training_script_args == words


def test_an_option_that_is_only_the_scripts_needs_no_word(script: Path) -> None:
    """Most training scripts have --seed and --output, so a line would stand at each start of most jobs."""
    words = ["train.py", "--seed", "42", "--output=o", "--log_dir", "l"]
    assert parse(words).says == (
        "--seed, --output, --log_dir are passed to train.py; for autoddp write them before the script",
    )
    script.write_text("add('--seed', '--output')\n")
    assert parse(words).says == ("--log_dir is passed to train.py; for autoddp write it before the script",)
    script.write_text("add('--seed', '--output')\nadd('--log_dir')\n")
    assert parse(words).says == ()


def test_a_program_whose_options_nobody_knows() -> None:
    found = parse(["--no-python", "bash", "--trials", "3"])
    assert (found.trials, found.torchrun.training_script_args) == (None, ["--trials", "3"])
    assert found.says == (LINES["unknown"].format("--trials 3", "bash"),)


def test_a_script_in_a_folder_with_spaces(script: Path) -> None:
    folder = script.parent / "my job"
    folder.mkdir()
    script.rename(folder / "my train.py")
    found = parse(["my job/my train.py", "--recipe", "my recipe.toml", "my words"])
    assert (found.recipe, found.torchrun.training_script_args) == (Path("my recipe.toml"), ["my words"])
    assert found.says == (LINES["taken"].format("--recipe 'my recipe.toml'", "my train.py"),)


def test_a_script_that_wants_its_local_rank(script: Path) -> None:
    script.write_text("add('--local_rank')\n")
    (line,) = parse(["train.py", "--lr", "1"]).says
    assert line.startswith("train.py has the option --local_rank, which torch.distributed.launch passed")
    assert parse(["train.py", "--local-rank=0"]).says == ()


def test_no_option_means_two_things() -> None:
    assert set(OWN) & {option for action in ACTIONS for option in action.option_strings} == set()


def test_the_whole_help_names_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = help_text(whole=True)
    missing = [option for option in [*OWN, *(option for _, option in SPELLINGS)] if option not in text]
    assert missing == []
    order = ["autoddp train.py --trials 20 ", "  diagnose ", "  --trials N", "  --force", "  --nnodes", "  --role"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert max(len(line) for line in text.splitlines()) <= 120


def test_help_fits_a_screen_and_names_every_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = help_text()
    lines = text.splitlines()
    assert [command for command in COMMANDS if not any(line.startswith(f"  {command} ") for line in lines)] == []
    assert "  --trials N" in text
    assert "autoddp --help-all" in lines[-1]
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 80
    for words in (["--help"], ["--nproc-per-node", "2", "--trials", "3", "-h"]):
        with pytest.raises(SystemExit) as ended:
            parse(words)
        assert ended.value.code == 0
        assert capsys.readouterr().out == text
    assert parse(["train.py", "--help"]).torchrun.training_script_args == ["--help"]


BAD = [
    ("", "no script given: autoddp [options] train.py [its arguments]; autoddp --help-all lists all"),
    ("--trials 4", "no script given: autoddp [options] train.py [its arguments]; autoddp --help-all lists all"),
    ("--trails 4 t.py", "unknown option --trails (did you mean '--trials'?); autoddp --help-all lists all"),
    ("--nproc-pre-node 4 t.py", "unknown option --nproc-pre-node (did you mean '--nproc-per-node'?); autoddp"),
    ("--zzz t.py", "unknown option --zzz; autoddp --help-all lists all"),
    ("--gpus 2 t.py", "unknown option --gpus (did you mean '--nproc-per-node'?); autoddp --help-all lists all"),
    ("-np 2 t.py", "unknown option -np (did you mean '--nproc-per-node'?); autoddp --help-all lists all"),
    ("-n2 t.py", "unknown option -n2 (did you mean '--nproc-per-node'?); autoddp --help-all lists all"),
    (
        "--num_machines=2 t.py",
        "unknown option --num_machines=2 (did you mean '--nnodes'?); autoddp --help-all lists all",
    ),
    ("--tri 4 t.py", "unknown option --tri (did you mean '--trials'?)"),
    ("--trials x t.py", "--trials 'x': must be a whole number of 0 or more, e.g. --trials 20"),
    ("--trials -3 t.py", "--trials '-3': must be a whole number of 0 or more, e.g. --trials 20"),
    ("--use-env t.py", "--use-env: an option of torch.distributed.launch. Under autoddp, as under torchrun, each"),
    ("--use_env=True t.py", "--use_env=True: an option of torch.distributed.launch. Under autoddp, as under torch"),
    ("--trials= t.py", "--trials '': must be a whole number of 0 or more, e.g. --trials 20"),
    ("--trials", "--trials: needs a value: a whole number of 0 or more, e.g. --trials 20"),
    ("--trials -- t.py", "--trials: needs a value: a whole number of 0 or more, e.g. --trials 20"),
    ("--recipe --trials 4 t.py", "--recipe: needs a value: --recipe FILE"),
    ("--recipe= t.py", "--recipe: its value is empty: give --recipe FILE, or leave it out"),
    ("--output= t.py", "--output: its value is empty: give --output DIR, or leave it out"),
    ("--seed -1 t.py", "--seed '-1': must be a whole number from 0 to 4294967295, e.g. --seed 0"),
    ("--trials t.py", "--trials 't.py': must be a whole number of 0 or more, e.g. --trials 20"),
    ("--near-limit 0 t.py", "--near-limit '0': must be a share above 0 and below 1, e.g. --near-limit 0.02"),
    ("--near-limit 2 t.py", "--near-limit '2': must be a share above 0 and below 1, e.g. --near-limit 0.02"),
    ("--lossy-limit much t.py", "--lossy-limit 'much': must be a share above 0, and 2 at most, e.g. --lossy-limit 0"),
    ("--lossy-limit 95 t.py", "--lossy-limit '95': must be a share above 0, and 2 at most, e.g. --lossy-limit 0.95"),
    ("--accumulate-up-to 0 t.py", "--accumulate-up-to '0': must be a whole number of 1 or more, e.g. --accumulate"),
    ("--allow batch t.py", "--allow: invalid choice: 'batch' (choose from "),
    ("--budget -5m t.py", "--budget: needs a value: a duration above 0, e.g. --budget 5m"),
    ("--verbose=1 t.py", "--verbose: takes no value, and got '1': write the option alone, or leave it out"),
    ("--standalone=1 t.py", "--standalone: takes no value, and got '1': write the option alone, or leave it out"),
    ("--budget 5x t.py", "--budget '5x': must be a duration above 0, e.g. --budget 5m"),
    ("--allow all t.py", "--allow: invalid choice: 'all' (choose from "),
    ("--keep-runs 0 t.py", "--keep-runs '0': must be a whole number of 1 or more, e.g. --keep-runs 20"),
    ("--keep-runs many t.py", "--keep-runs 'many': must be a whole number of 1 or more, e.g. --keep-runs 20"),
    ("--isolation full t.py", "--isolation 'full': must be overlay, guard or off, e.g. --isolation guard"),
    ("--isolation --fresh t.py", "--isolation: needs a value: overlay, guard or off, e.g. --isolation guard"),
    ("--scratch-limit 0 t.py", "--scratch-limit '0': must be a size such as 20G, or a share such as 20%, e.g. --scr"),
    ("--scratch-limit 0% t.py", "--scratch-limit '0%': must be a size such as 20G, or a share such as 20%, e.g. --s"),
    ("--scratch-limit 101% t.py", "--scratch-limit '101%': must be a size such as 20G, or a share such as 20%, e.g."),
    ("--scratch-limit -5 t.py", "--scratch-limit '-5': must be a size such as 20G, or a share such as 20%, e.g. --s"),
    ("--max-restarts x t.py", "--max-restarts/--max_restarts: invalid int value: 'x'"),
    ("--nnodes", "--nnodes: expected one argument"),
    ("--logs-specs=-- t.py", "--logs-specs: no option takes the value --: give another one, or leave it out"),
    ("--recipe=-- t.py", "--recipe: no option takes the value --: give another one, or leave it out"),
]


@pytest.mark.parametrize(("words", "line"), BAD, ids=[words for words, _ in BAD])
def test_a_command_line_that_cannot_be(words: str, line: str) -> None:
    with pytest.raises(UsageError, match=r"^[^\n]+$") as caught:
        parse(words.split())
    assert str(caught.value).startswith(line)


def test_options_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"ALLOW": "exact", "TRIALS": "7", "VERBOSE": "1", "DRY_RUN": "0", "ISOLATION": "guard"}
    for name, value in given.items():
        monkeypatch.setenv(f"AUTODDP_{name}", value)
    found = parse(SCRIPT)
    assert found.isolation is Level.GUARD
    assert (found.allow, found.trials, found.verbose, found.dry_run) == (Rung.EXACT, 7, True, False)
    assert found.given == frozenset()  # so that no command refuses what was not meant for it
    overruled = parse(["--allow", "near", *SCRIPT])
    assert (overruled.allow, overruled.trials) == (Rung.NEAR, 7)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("AUTODDP_ALOW", "exact", "AUTODDP_ALOW: no variable of autoddp (did you mean 'AUTODDP_ALLOW'?); unset it"),
        ("AUTODDP_HELP", "1", "AUTODDP_HELP: no variable of autoddp (did you mean"),  # torchrun reads no PET_HELP
        ("AUTODDP_NPROC_PER_NODE", "8", "an option of torchrun: set PET_NPROC_PER_NODE instead"),
        ("AUTODDP_ALLOW", "nearly", "from the environment"),
        ("AUTODDP_TRIALS", "-3", "from the environment"),
        ("AUTODDP_RECIPE", "", "--recipe: its value is empty: give --recipe FILE, or leave it out (from the"),
        ("AUTODDP_VERBOSE", "maybe", "AUTODDP_VERBOSE=maybe: must be 1 or 0"),
    ],
)
def test_a_variable_that_cannot_be_understood_is_an_error(
    name: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as raised:
        parse(SCRIPT)
    assert says in str(raised.value)


@pytest.mark.parametrize("service", ["AUTODDP", "AUTODDP_TRAIN_1"])
def test_variables_that_kubernetes_sets_for_a_service_are_left_alone(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each pod of a namespace, for a Service called autoddp-train-1, such as that of its TensorBoard."""
    for name in ("SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP", "PORT_80_TCP_ADDR", "SERVICE_HOST"):
        monkeypatch.setenv(f"{service}_{name}", "tcp://10.0.0.11:80")
    monkeypatch.setenv("AUTODDP_ALLOW", "exact")
    assert parse(SCRIPT).allow is Rung.EXACT
    monkeypatch.delenv(f"{service}_SERVICE_HOST")
    with pytest.raises(UsageError, match=rf"^{service}_[A-Z_0-9]*PORT[A-Z_0-9]*: no variable of autoddp"):
        parse(SCRIPT)


@pytest.mark.parametrize("name", [*RESERVED, "AUTODDP_WORKER_TUNES", "AUTODDP_CLOCK_AHEAD", "AUTODDP_RECORDS_CALLS"])
def test_variables_of_autoddp_that_are_no_options_are_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert parse(SCRIPT).isolation is None
