"""Several of the script's steps in one: bit for bit what the loop written by hand gives, asked for or not at all."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from launchers import AUTODDP, SCRIPTS, TORCHRUN, start, whole

from autoddp.knobs import Configuration, Rung
from autoddp.recipe import load, save

LARGE = str(SCRIPTS / "large_batch.py")
SEVERAL = str(SCRIPTS / "several.py")
TWO = ["--nproc-per-node", "2"]
LONGER = {"TUNED_TIMES_LONGER": "20"}
WAYS = (
    "",
    "--clip --schedule",
    "--scaler",
    "--scaler --clip --adam",
    "--clears after --adam",
    "--clears late",
    "--clears model",
    "--clears zeros --schedule",
)


def parameters(folder):
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def tuned(folder, *words):
    launch = start(AUTODDP, folder, [*TWO, "--tune-only", *words], LONGER).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    return launch, json.loads(max(launch.folder.glob(".autoddp/*/summary.json")).read_text())


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    return tuned(folder / "out", "--trials", "8", "--accumulate-up-to", "4", LARGE)


@pytest.fixture(scope="module")
def trained(study, tmp_path_factory):
    """All ways to train, in one launch a side."""
    folder = tmp_path_factory.mktemp("trained")
    found = load(study[0].folder / "scripts.large_batch.autoddp.toml")
    recipe = str(folder / "recipe.toml")
    save(replace(found, configuration=Configuration({"accumulate_steps": 4}), env={}), recipe)
    launches = [
        start(TORCHRUN, folder / "hand", [*TWO, SEVERAL, *(f"large_batch.py {way} --by-hand 4" for way in WAYS)]),
        start(AUTODDP, folder / "recipe", [*TWO, "--recipe", recipe, SEVERAL, *(f"large_batch.py {w}" for w in WAYS)]),
        start(TORCHRUN, folder / "written", [*TWO, SEVERAL, *(f"large_batch.py {way}" for way in WAYS)]),
    ]
    for launch in launches:
        assert launch.wait().returncode == 0, launch.stderr[-2000:]
    return [launch.folder for launch in launches]


@pytest.mark.parametrize("way", WAYS)
def test_the_same_parameters_as_by_hand(trained, way):
    hand, recipe, written = trained
    name = "-".join(["large_batch", *way.split()]).replace("---", "-")
    expected, found = parameters(hand / f"{name}-by-hand-4"), parameters(recipe / name)
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    every_step = torch.load(written / name / "rank0.pt")
    assert not any(torch.equal(found[0][key], every_step[key]) for key in every_step)


def test_the_rung_is_tried_and_measured_by_the_sample(study):
    launch, summary = study
    trials = [trial for trial in summary["trials"] if trial["rung"] == "batch"]
    assert [trial["configuration"]["accumulate_steps"] for trial in trials] == [4, 2]
    assert all(trial["state"] != "failed" for trial in trials)
    entry = next(entry for entry in summary["ladder"] if entry["rung"] == "batch")
    assert entry["seconds"] < 1.5 * summary["baseline"]["seconds"]
    recipe = load(launch.folder / "scripts.large_batch.autoddp.toml")
    assert any(entry.rung is Rung.BATCH for entry in recipe.ladder)


@pytest.mark.whole
def test_what_nobody_asked_for_is_not_tried(tmp_path):
    _, summary = tuned(tmp_path / "out", "--trials", "4", "--allow", "lossy", LARGE)
    assert all("accumulate_steps" not in trial["configuration"] for trial in summary["trials"])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((LARGE, "--clears", "by hand"), "the script clears gradients without zero_grad"),
        whole((str(SCRIPTS / "gan.py"),), "no one optimizer steps all that DDP reduces"),
        whole((str(SCRIPTS / "closure.py"),), "the optimizer runs backward itself (a closure)"),
    ],
)
def test_what_cannot_be_is_left_as_it_is(tmp_path, words, why):
    _, summary = tuned(tmp_path / "out", "--trials", "2", "--accumulate-up-to", "4", *words)
    assert summary["job"]["left_out"]["accumulate_steps"] == why
