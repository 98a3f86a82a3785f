"""What a study leaves: a summary and a report always, a recipe only where it has decided something."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_one_decision import NEAR, outcome, standing

import autoddp
from autoddp import codec
from autoddp.attempts.tune import Tuned
from autoddp.cli.tuned import Results, joined
from autoddp.commandline.environment import job_environment
from autoddp.commandline.mode import Mode
from autoddp.commandline.saved_recipes import arguments_digest, script_names
from autoddp.commandline.words import parse
from autoddp.errors import NothingReadable, NotTuned, UnfitRecipe
from autoddp.files import write_whole
from autoddp.hosts.late_hosts import Plan, Running
from autoddp.knobs import AS_WRITTEN, Configuration, Rung
from autoddp.network.own_network import Network
from autoddp.recipe import Recipe, dump, load
from autoddp.recipe import parse as parse_recipe
from autoddp.runs.folder import RunFolder
from autoddp.study import INTERRUPTED, Decision, Outcome, StudySettings, TrialRecord
from autoddp.timing import Block
from autoddp.timing.timeline import Timeline
from autoddp.torchrun.surroundings import FRESH_STORE
from autoddp.version import __version__

BASELINE = [1.0] * 6
DECIDED = outcome((standing(NEAR[0], BASELINE, [0.5, 0.51] * 3),), BASELINE, StudySettings(allow=Rung.NEAR))
NOTHING_TO_WIN = replace(
    DECIDED, baseline_rounds=(), finalists=(), ladder=(), decision=Decision(AS_WRITTEN, "only 1 % could be won")
)
UNDECIDED = replace(
    NOTHING_TO_WIN, decision=Decision(AS_WRITTEN, "undecided: --budget 3m would decide it", is_open=True)
)
BUSY = replace(DECIDED, decision=Decision(AS_WRITTEN, "undecided: near gives ×1.2 (0.9 to 1.6), which differ too much"))
WORDS = ["--nproc-per-node", "2", "train.py"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFolder]:
    """The run's, in a current folder that has a script."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    found = RunFolder(Path(".autoddp"))
    yield found
    found.clean()


def comes_of(found: Outcome, folder: RunFolder, *options: str) -> Mode:
    with Results(parse([*options, *WORDS]), folder, Network()) as results:
        tuned = Tuned(recipe=results.recipe(found, ()), outcome=found, built_ddp=True)
        results.observer.finished(found)
    return results.mode(Mode(tune=True, several_nodes=False), tuned)


def recipes() -> list[Path]:
    return list(Path().glob("*.toml"))


def test_a_decision_becomes_a_recipe(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    mode = comes_of(DECIDED, folder)
    assert mode.configuration == DECIDED.decision.configuration != AS_WRITTEN
    (written,) = recipes()
    assert load(written).evidence.final_rounds == 6
    said = capsys.readouterr().err
    assert said.count("launching ") == 0
    assert said.splitlines()[-1] == "autoddp: starting the job"
    assert "×1.98 faster" in said


def test_an_undecided_study_leaves_no_recipe_and_says_so_in_one_line(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    mode = comes_of(UNDECIDED, folder)
    assert (mode.recipe, recipes()) == (None, [])
    assert folder.summary.exists()
    assert folder.report.exists()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "launching" in line]
    assert line.startswith("autoddp: launching as written; see ")
    with pytest.raises(NotTuned, match=r"no recipe was written: undecided: "):
        comes_of(UNDECIDED, folder, "--tune-only")


def test_a_page_and_a_trace_that_cannot_be_written_cost_a_line_each(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "planted")

    monkeypatch.setitem(sys.modules, "autoddp.report.page", None)  # importing it is an error, as with a broken jinja2
    monkeypatch.setattr("autoddp.cli.tuned.write_trace", fails)
    mode = comes_of(replace(DECIDED, timelines=(Timeline(0, "", 0.0, 0.0, (1.0,), ()),)), folder, "--trace")
    assert mode.configuration == DECIDED.decision.configuration
    said = capsys.readouterr().err.splitlines()
    (of_the_page,) = [line for line in said if "report.html" in line]  # nor does the answer name it
    assert of_the_page.startswith(f"autoddp: warning: {folder.report} could not be written: ")
    (of_the_trace,) = [line for line in said if "planted" in line]
    assert of_the_trace.startswith(f"autoddp: warning: {folder.trace} could not be written: ")
    assert folder.summary.exists()
    assert len(recipes()) == 1


@pytest.mark.parametrize("found", [NOTHING_TO_WIN, UNDECIDED, BUSY])
def test_a_study_that_decides_nothing_replaces_no_recipe_with_final_rounds(
    found: Outcome, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    comes_of(DECIDED, folder)
    (written,) = recipes()
    before = written.read_text()
    mode = comes_of(found, folder)
    assert mode.configuration == AS_WRITTEN
    said = capsys.readouterr().err
    assert "your settings stay" in said
    assert said.count("autoddp: launching as written") == 1
    assert recipes() == [written]
    assert written.read_text() == before
    named = ["--recipe", str(written), "--trials", "20"]
    assert comes_of(found, folder, *named).configuration == AS_WRITTEN
    assert written.read_text() == before


def test_an_undecided_recipe_stays_for_no_other_one(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """Of hosts that share a folder, the second one finds there what the first one has just written."""
    comes_of(BUSY, folder)
    capsys.readouterr()
    mode = comes_of(replace(BUSY, decision=replace(BUSY.decision, why="undecided: likewise")), folder)
    (written,) = recipes()
    assert load(written).evidence.why == "undecided: likewise"
    assert mode.recipe == load(written)
    said = capsys.readouterr().err
    assert "stays:" not in said
    assert "starting the job" in said


def test_on_several_hosts_one_whose_older_recipe_stays_launches_what_the_others_do(folder: RunFolder) -> None:
    """The ranks of a host with a recipe wait ten seconds for the answers of those that have been given none."""
    comes_of(DECIDED, folder)
    (older,) = recipes()
    launched = []
    for is_new_here in (False, True):
        if is_new_here:
            older.unlink()
        with Results(parse(WORDS), folder, Network()) as results:
            made = results.recipe(BUSY, ())
        mode = results.mode(Mode(tune=True, several_nodes=True), Tuned(recipe=made, outcome=BUSY, built_ddp=True))
        assert mode.path == older
        launched.append((mode.digest(parse(WORDS)), job_environment(parse(WORDS), mode, Network()).keys()))
    assert launched[0] == launched[1]


@pytest.mark.parametrize("own_ranks", [False, True])
def test_ranks_that_the_script_starts_are_launched_as_they_were_measured(own_ranks: bool, folder: RunFolder) -> None:
    """Without a decision there is no recipe, and under torchrun they wait for a store that nobody makes."""
    found = replace(UNDECIDED, facts=codec.replace(UNDECIDED.facts, own_ranks=own_ranks))
    mode = comes_of(found, folder)
    assert mode.recipe is None
    assert (job_environment(parse(WORDS), mode, Network()).get(*FRESH_STORE) is not None) == own_ranks


def test_where_nothing_can_be_won_that_is_a_recipe(folder: RunFolder) -> None:
    comes_of(NOTHING_TO_WIN, folder)
    (written,) = recipes()
    assert load(written).configuration == AS_WRITTEN
    comes_of(DECIDED, folder)  # a study with final rounds replaces it
    assert load(written).evidence.final_rounds == 6


def test_a_study_that_ended_early_launches_what_it_had(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    mode = comes_of(replace(DECIDED, ended="host1 has left"), folder)
    assert mode.configuration == DECIDED.decision.configuration
    said = capsys.readouterr().err
    assert "tuning ended early, and what was measured until then decides: host1 has left" in said
    assert "by            gradients sent in bf16" in said


@pytest.mark.parametrize("found", [UNDECIDED, DECIDED])
def test_a_folder_of_the_run_that_was_removed_is_not_named(
    found: Outcome, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.path.rename("elsewhere")
    comes_of(found, folder)
    said = capsys.readouterr().err
    (line,) = [line for line in said.splitlines() if str(folder.path.name) in line and "tuning train.py" not in line]
    assert line == f"autoddp: no report is written: {folder.path} was removed meanwhile"
    assert folder.why_not_written(FileNotFoundError("x")) == f"{folder.path} was removed meanwhile"


def interrupted(found: Outcome, folder: RunFolder) -> None:
    with Results(parse(WORDS), folder, Network()) as results:
        results.observer.finished(found)
        results.recipe(found, ())
        raise KeyboardInterrupt


def test_an_interrupted_study_launches_nothing_and_is_kept(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(replace(DECIDED, ended=INTERRUPTED), folder)
    assert folder.summary.exists()
    assert folder.report.exists()
    assert "launching" not in capsys.readouterr().err
    assert recipes() == []


def test_a_program_reads_what_was_found(folder: RunFolder) -> None:
    trials = (
        TrialRecord(1, Configuration({"bucket_cap_mb": 8.0}), "measured", (Block((0.8,)),)),
        TrialRecord(2, Configuration({"hook": "bf16"}), "failed", reason="killed"),
    )
    comes_of(replace(DECIDED, trials=trials), folder)
    run = autoddp.load_run(folder.path)
    assert run == autoddp.load_run(str(folder.summary))
    assert run.folder == folder.path
    first, second = run.trials
    assert (first["bucket_cap_mb"], first["hook"], first["seconds"], first["speedup"]) == (8.0, None, 0.8, 1 / 0.8)
    assert (second["hook"], second["state"], second["reason"], second["speedup"]) == ("bf16", "failed", "killed", None)
    (near,) = run.ladder
    assert near["configuration"] == {"hook": "bf16"}
    assert 1.9 < near["low"] < near["speedup"] < near["high"] < 2.1
    assert run.recipe is not None
    assert run.recipe.configuration == DECIDED.decision.configuration
    assert run.diagnosis is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": 0}'])
def test_what_is_no_summary_is_said(text: str) -> None:
    Path("summary.json").write_text(text)
    with pytest.raises(NothingReadable, match=r"^summary.json: "):
        autoddp.load_run("summary.json")


def test_a_job_that_is_tuned_beside_this_one_keeps_its_recipe(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both found the place free, and wrote it seconds later, after their summaries."""
    comes_of(DECIDED, folder)
    (theirs,) = recipes()
    other = theirs.read_text()
    theirs.unlink()
    monkeypatch.setattr(Results, "_write_summary", lambda *_: theirs.write_text(other))
    mine = replace(DECIDED, facts=codec.replace(DECIDED.facts, parameters_digest="f" * 16))
    comes_of(mine, folder)
    assert theirs.read_text() == other
    assert len(recipes()) == 2


def test_a_recipe_that_comes_at_the_last_moment_stays(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS a host may not see for half a minute what another has written, and replaced it without a copy."""
    comes_of(DECIDED, folder)
    (theirs,) = recipes()
    other = theirs.read_text()
    theirs.unlink()

    def late(path: Path, content: str | bytes, **how: bool) -> None:
        if not theirs.exists():
            theirs.write_text(other)
        write_whole(path, content, **how)

    monkeypatch.setattr("autoddp.recipe.write.write_whole", late)
    mine = replace(DECIDED, facts=codec.replace(DECIDED.facts, parameters_digest="f" * 16))
    place = comes_of(mine, folder).path
    assert place is not None
    assert theirs.read_text() == other
    assert sorted(recipes()) == sorted([theirs, place])
    assert load(place).fits.parameters_digest == "f" * 16
    assert not list(Path().glob(".autoddp-*"))


@pytest.mark.parametrize(
    ("words", "next_start", "undo"),
    [
        (["train.py"], "train.py", "train.py"),
        (["-m", "pkg.train"], "-m pkg.train", "-m pkg.train"),
        (["--no-python", "./train.sh"], "--no-python ./train.sh", "--no-python ./train.sh"),
        (["--run-path", "train.py"], "--run-path train.py", "--run-path train.py"),
        (
            ["--standalone", "-r", "3", "--max-restarts", "2", "--nnodes=1", "--log-dir", "my logs", "train.py"],
            "train.py",
            "--nnodes=1 --standalone --max-restarts=2 '--log-dir=my logs' --redirects=3 train.py",
        ),
        (["--trials", "20", "--recipe", "bf16.toml", "train.py"], "--recipe bf16.toml train.py", "train.py"),
        (["--", "train.py", "--trials=5", "x"], "train.py", "-- train.py --trials=5 x"),  # else autoddp took it
    ],
)
def test_the_commands_that_are_told_do_what_is_said(
    words: list[str], next_start: str, undo: str, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each starts the same kind of script with the same number of ranks, and finds the recipe that was written."""
    with Results(parse(["--nproc-per-node", "2", *words]), folder, Network()) as results:
        tuned = Tuned(recipe=results.recipe(DECIDED, ()), outcome=DECIDED, built_ddp=True)
    results.mode(Mode(tune=True, several_nodes=False), tuned)
    said = " ".join(capsys.readouterr().err.split())
    assert f"used by the next autoddp --nproc-per-node 2 {next_start} in your code" in said
    assert f"undo torchrun --nproc-per-node 2 {undo} autoddp: starting the job" in said
    commands = autoddp.load_run(folder.path).summary["commands"]
    assert ("--recipe" in commands["autoddp"]) == ("--recipe" in words)
    assert commands["autoddp"].endswith(undo)
    assert commands["torchrun"] == f"torchrun --nproc-per-node 2 {undo}"


def test_a_recipe_that_only_the_host_that_leads_can_read_is_not_launched_as_written(folder: RunFolder) -> None:
    """Its ranks would wait for those of this host, or reduce other things than they."""
    with Results(parse(WORDS), folder, Network()) as results:
        pass
    with pytest.raises(UnfitRecipe, match=r"^the other hosts launch what this one cannot read: .*newer autoddp"):
        results.mode(Mode(tune=True, several_nodes=True), Tuned(recipe="schema = 99\n", built_ddp=True))


def test_a_recipe_of_another_version_is_not_launched_as_written_where_all_else_is_readable(folder: RunFolder) -> None:
    """A key more under [evidence] makes a recipe unreadable, and an outcome not."""
    with Results(parse(WORDS), folder, Network()) as results:
        of_later = results.recipe(DECIDED, ()).replace("[evidence]\n", "[evidence]\nof_later = 1\n")
    # Of another checkout of this version, or of a newer one.
    for made in (of_later, of_later.replace(f'autoddp = "{__version__}"', 'autoddp = "99.0"')):
        newer = Tuned(recipe=made, outcome=DECIDED, built_ddp=True)
        with pytest.raises(UnfitRecipe, match=r"^the other hosts launch what this one cannot read: .*unknown key"):
            results.mode(Mode(tune=True, several_nodes=True), newer)


def test_a_recipe_that_no_host_can_read_is_told_to_none(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unsound(recipe: Recipe) -> str:
        return dump(recipe).replace("[evidence]\n", "[evidence]\nof_nobody = 1\n")

    monkeypatch.setattr("autoddp.cli.tuned.dump", unsound)
    with Results(parse(WORDS), folder, Network()) as results:
        assert results.recipe(DECIDED, ()) == ""
    found = Tuned(outcome=DECIDED, built_ddp=True)
    assert results.mode(Mode(tune=True, several_nodes=True), found).configuration == AS_WRITTEN
    assert recipes() == []
    said = capsys.readouterr().err
    assert "warning: not tuned, launching as written: the recipe that was found is not sound: " in said
    assert "faster" not in said  # what is launched is not


@pytest.mark.parametrize("late", [False, True], ids=["tuned together", "came later"])
def test_a_host_with_the_script_in_another_place_and_other_arguments_finds_its_recipe(
    late: bool, folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked for its own name of the script: the next start tuned there, and was refused on all hosts."""
    with Results(parse([*WORDS, "--data", "a"]), folder, Network()) as results:
        made = results.recipe(DECIDED, ())
    there = tmp_path / "home"
    there.mkdir()
    monkeypatch.chdir(there)
    here = parse(["--nproc-per-node", "2", "../train.py", "--data", "b"])
    mode = Mode(tune=True, several_nodes=True)
    if late:
        running = replace(mode, tune=False, recipe=parse_recipe(made, "")).digest(here)
        mode = joined(here, mode, Plan(), Running(running, recipe=made), None)
    else:
        with Results(here, folder, Network()) as results:
            pass
        mode = results.mode(mode, Tuned(recipe=made, outcome=DECIDED, built_ddp=True))
    (written,) = recipes()
    found = load(written)
    assert written == mode.path
    assert found == mode.recipe
    assert found.fits.script == script_names(here)[0] == f"*/{tmp_path.name}/train.py"
    assert found.made_by.arguments == arguments_digest(here)
    assert found.configuration == DECIDED.decision.configuration


def test_where_nothing_is_launched_a_recipe_that_cannot_be_read_is_none(folder: RunFolder) -> None:
    with Results(parse(["--tune-only", *WORDS]), folder, Network()) as results:
        pass
    with pytest.raises(NotTuned, match=r"^no recipe was written: .* is not sound: .*newer autoddp"):
        results.mode(Mode(tune=True, several_nodes=True), Tuned(recipe="schema = 99\n", built_ddp=True))
