"""Micro-batches that each reduce: put off to the last one, bit for bit what no_sync written by hand gives."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from launchers import AUTODDP, BRIEF, SCRIPTS, SEVERAL, chosen, start, whole
from scripts.several import folder_of

from autoddp.cli.predict import run
from autoddp.codec import convert
from autoddp.errors import UsageError
from autoddp.knobs import Configuration
from autoddp.predict import Elsewhere, Profile, moved, step_seconds
from autoddp.recipe import load, save

MICRO = str(SCRIPTS / "micro_batches.py")
TWO = ["--nproc-per-node", "2"]
COMMANDS = (whole("micro_batches.py"), "micro_batches.py --batches 30 --clip", "micro_batches.py --batches 28")
BY_TORCHRUN = {"test_the_same_parameters_as_no_sync_by_hand": lambda command: [command, f"{command} --by-hand"]}


def parameters(folder):
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def equal(one, other, buffers=True):
    names = [name for name in one[0] if buffers or "running" not in name]
    return all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in names)


def tuned(folder, *words, times_longer="20"):
    """The folder of a launch that tunes the script, and the summary of its study."""
    words = [*TWO, "--tune-only", "--diagnose-budget", "0", *words]
    launch = start(BRIEF, folder / "out", words, {"TUNED_TIMES_LONGER": times_longer}).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    return launch.folder, json.loads(max(launch.folder.glob(".autoddp/2*/summary.json")).read_text())


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return tuned(tmp_path_factory.mktemp("tuned"), "--trials", "1", MICRO)


@pytest.fixture(scope="module")
def recipe(study):
    """A recipe of this model that puts reductions off and does nothing else."""
    folder, summary = study
    assert summary["job"]["micro_batches"] == 4
    assert all(trial["configuration"]["defer_reductions"] == 4 for trial in summary["trials"])
    found = load(folder / "scripts.micro_batches.autoddp.toml")
    save(replace(found, configuration=Configuration({"defer_reductions": 4}), env={}), folder.parent / "recipe.toml")
    return str(folder.parent / "recipe.toml")


@pytest.fixture(scope="module")
def trained(request, recipe, tmp_path_factory):
    """All ways to train that are run, in one launch."""
    commands = chosen(request, "test_the_same_parameters_as_no_sync_by_hand", "command")
    words = [*TWO, "--recipe", recipe, SEVERAL, *commands]
    launch = start(AUTODDP, tmp_path_factory.mktemp("trained") / "recipe", words).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    return launch.folder


@pytest.mark.parametrize("command", COMMANDS)
def test_the_same_parameters_as_no_sync_by_hand(trained, by_torchrun, command):
    """30 batches make a last step of two in each epoch, earlier than learned; clipping reads the gradients first."""
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


def predicted(file, capsys, *words):
    """What `autoddp predict` answers: the row of the script as written, and the whole answer."""
    assert run([str(file), *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return found["rows"][0], found


def deferred(summary, there=None):
    """The predicted seconds of a step in which only the last backward pass reduces: there, or where it was measured."""
    profile, _ = moved(convert(summary["profile"], Profile), there or Elsewhere())
    return step_seconds(profile, Configuration({"defer_reductions": 4}))


def test_its_steps_are_predicted(study, capsys):
    """As written each of four backward passes reduces. On a slow link, deferring them saves three reductions of four.

    The machine may be busy in any of these moments: no measured figure is compared with a predicted one, and the link
    is so slow that what was measured of computing does not count.
    """
    folder, summary = study
    (recipe,) = folder.glob("*.autoddp.toml")
    row, found = predicted(recipe, capsys)
    assert (found["passes"], found["reductions"]) == (4, 4)
    assert row["step_ms"] > 0
    assert row["measured_ms"] > 0
    assert all(trial["predicted"] for trial in summary["trials"])
    slow = ["--nodes", "2", "--nproc-per-node", "1", "--link", "1Kbit", "--latency", "10us"]
    row, _ = predicted(recipe, capsys, *slow)
    there = Elsewhere(nodes=2, ranks_per_node=1, rate=125.0, latency=10e-6)
    assert row["step_ms"] / 1e3 == pytest.approx(4 * deferred(summary, there), rel=0.2)


@pytest.mark.whole
def test_a_script_with_no_sync_is_left_as_it_is(tmp_path, capsys):
    folder, summary = tuned(tmp_path, "--trials", "3", MICRO, "--by-hand", "--batches", "100")
    assert summary["job"]["left_out"]["defer_reductions"] == "each step has one reduction"
    row, found = predicted(next(folder.glob(".autoddp/2*")), capsys)
    assert (found["passes"], found["reductions"]) == (4, 1)
    assert row["step_ms"] > 0
    assert row["measured_ms"] > 0


@pytest.mark.whole
def test_steps_of_different_lengths_are_not_predicted(tmp_path):
    """Every second step has two backward passes in place of four, so no step is a usual one."""
    folder, _ = tuned(tmp_path, "--trials", "3", MICRO, "--batches", "6", "--epochs", "800", times_longer="1")
    with pytest.raises(UsageError, match=r"different numbers of backward passes \(2, 4\).*give each step as many"):
        run([str(next(folder.glob(".autoddp/2*")))])
