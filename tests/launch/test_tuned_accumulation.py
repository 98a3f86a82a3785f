"""Several of the script's steps in one: bit for bit what the loop written by hand gives, asked for or not at all."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from launchers import AUTODDP, BRIEF, SCRIPTS, SEVERAL, chosen, start, whole
from scripts.several import folder_of

from autoddp.knobs import Configuration, Rung
from autoddp.recipe import load, save

LARGE = str(SCRIPTS / "large_batch.py")
TWO = ["--nproc-per-node", "2"]
LONGER = {"TUNED_TIMES_LONGER": "20"}
WAYS = (
    whole(""),
    whole("--clip --schedule"),
    whole("--scaler"),
    whole("--scaler --clip --adam"),
    whole("--clears after --adam"),
    whole("--clears late"),
    whole("--clears model"),
    whole("--clears zeros --schedule"),
    "--steps 30 --clip --schedule --clears model",
    "--steps 30 --scaler --clip --adam --clears late",
)
BY_TORCHRUN = {"test_the_same_parameters_as_by_hand": lambda way: [written(way), by_hand(way)]}


def written(way):
    return f"large_batch.py {way}".strip()


def by_hand(way):
    return f"{written(way)} --by-hand 4"


def parameters(folder):
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def tuned(folder, *words):
    launch = start(BRIEF, folder, [*TWO, "--tune-only", "--diagnose-budget", "0", *words], LONGER).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    return launch, json.loads(max(launch.folder.glob(".autoddp/2*/summary.json")).read_text())


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    return tuned(folder / "out", "--trials", "4", "--accumulate-up-to", "4", LARGE)


@pytest.fixture(scope="module")
def trained(request, study, tmp_path_factory):
    """All ways to train that are run, in one launch."""
    ways = chosen(request, "test_the_same_parameters_as_by_hand", "way")
    folder = tmp_path_factory.mktemp("trained")
    found = load(study[0].folder / "scripts.large_batch.autoddp.toml")
    recipe = str(folder / "recipe.toml")
    save(replace(found, configuration=Configuration({"accumulate_steps": 4}), env={}), recipe)
    launch = start(AUTODDP, folder / "out", [*TWO, "--recipe", recipe, SEVERAL, *map(written, ways)]).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    return launch.folder


@pytest.mark.parametrize("way", WAYS)
def test_the_same_parameters_as_by_hand(trained, by_torchrun, way):
    expected, found = parameters(by_torchrun / folder_of(by_hand(way))), parameters(trained / folder_of(written(way)))
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    every_step = torch.load(by_torchrun / folder_of(written(way)) / "rank0.pt")
    assert not any(torch.equal(found[0][key], every_step[key]) for key in every_step)


def test_the_rung_is_tried_and_measured_by_the_sample(study):
    """tests/worker/test_runner.py has what a rank says of several steps in one."""
    launch, summary = study
    trials = [trial for trial in summary["trials"] if trial["rung"] == "batch"]
    assert [trial["configuration"]["accumulate_steps"] for trial in trials] == [4]
    assert all(trial["state"] != "failed" for trial in trials)
    entry = next(entry for entry in summary["ladder"] if entry["rung"] == "batch")
    assert entry["rounds"]
    (journal,) = launch.folder.glob(".autoddp/2*/journal.jsonl")
    measured = [json.loads(line) for line in journal.read_text().splitlines()]
    together = {one["asked"]["configuration"].get("accumulate_steps", 1): one["asked"]["at_once"] for one in measured}
    assert together == {1: 1, 4: 4}
    recipe = load(launch.folder / "scripts.large_batch.autoddp.toml")
    assert any(entry.rung is Rung.BATCH for entry in recipe.ladder)


@pytest.mark.whole
def test_what_nobody_asked_for_is_not_tried(tmp_path):
    _, summary = tuned(tmp_path / "out", "--trials", "4", "--allow", "lossy", LARGE)
    assert all("accumulate_steps" not in trial["configuration"] for trial in summary["trials"])


@pytest.mark.whole
@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("gan.py", "no one optimizer steps all that DDP reduces"),
        ("closure.py", "the optimizer runs backward itself (a closure)"),
    ],
)
def test_what_cannot_be_is_left_as_it_is(tmp_path, script, why):
    """test_tuned_applicability.py has a script that clears its gradients by hand."""
    _, summary = tuned(tmp_path / "out", "--trials", "2", "--accumulate-up-to", "4", str(SCRIPTS / script))
    assert summary["job"]["left_out"]["accumulate_steps"] == why
