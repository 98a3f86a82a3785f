"""Micro-batches that each reduce: put off to the last one, bit for bit what no_sync written by hand gives."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from launchers import AUTODDP, SCRIPTS, SEVERAL, start
from scripts.several import folder_of

from autoddp.knobs import Configuration
from autoddp.recipe import load, save

MICRO = str(SCRIPTS / "micro_batches.py")
TWO = ["--nproc-per-node", "2"]
COMMANDS = ("micro_batches.py", "micro_batches.py --clip", "micro_batches.py --batches 100")
BY_TORCHRUN = {"test_the_same_parameters_as_no_sync_by_hand": lambda command: [command, f"{command} --by-hand"]}


def parameters(folder):
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def equal(one, other, buffers=True):
    names = [name for name in one[0] if buffers or "running" not in name]
    return all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in names)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe of this model that puts reductions off and does nothing else."""
    folder = tmp_path_factory.mktemp("tuned")
    words = [*TWO, "--trials", "3", "--tune-only", MICRO]
    launch = start(AUTODDP, folder / "out", words, {"TUNED_TIMES_LONGER": "20"}).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    study = json.loads(max(launch.folder.glob(".autoddp/2*/summary.json")).read_text())
    assert study["job"]["micro_batches"] == 4
    assert all(trial["configuration"]["defer_reductions"] == 4 for trial in study["trials"])
    found = load(launch.folder / "scripts.micro_batches.autoddp.toml")
    save(replace(found, configuration=Configuration({"defer_reductions": 4}), env={}), folder / "recipe.toml")
    return str(folder / "recipe.toml")


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory):
    """All ways to train, in one launch."""
    words = [*TWO, "--recipe", recipe, SEVERAL, *COMMANDS]
    launch = start(AUTODDP, tmp_path_factory.mktemp("trained") / "recipe", words).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    return launch.folder


@pytest.mark.parametrize("command", COMMANDS)
def test_the_same_parameters_as_no_sync_by_hand(trained, by_torchrun, command):
    """102 batches make a last step of two in each epoch, earlier than learned; clipping reads the gradients first."""
    hand, deferred, every = (
        parameters(folder)
        for folder in (
            by_torchrun / folder_of(f"{command} --by-hand"),
            trained / folder_of(command),
            by_torchrun / folder_of(command),
        )
    )
    assert equal(hand, deferred, buffers=False)
    assert equal(deferred[:1], deferred[1:], buffers=False)
    for name, value in every[0].items():  # other additions, the same mathematics; buffers as where each reduces
        assert torch.allclose(value, deferred[0][name], rtol=1e-3, atol=1e-5), name


@pytest.mark.whole
def test_a_script_with_no_sync_is_left_as_it_is(tmp_path):
    words = [*TWO, "--trials", "3", "--tune-only", MICRO, "--by-hand", "--batches", "100"]
    launch = start(AUTODDP, tmp_path / "out", words, {"TUNED_TIMES_LONGER": "20"}).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    study = json.loads(max(launch.folder.glob(".autoddp/2*/summary.json")).read_text())
    assert study["job"]["left_out"]["defer_reductions"] == "each step has one reduction"
