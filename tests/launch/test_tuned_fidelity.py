"""The gradient error, measured on the live job: on the ladder, in the recipe, and refused above the limit."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from launchers import AUTODDP, SCRIPTS, TORCHRUN, start

from autoddp.knobs import Configuration
from autoddp.recipe import load, save

ODD = str(SCRIPTS / "odd_gradients.py")


def tuned(folder, *words):
    words = ["--nproc-per-node", "2", "--trials", "16", "--tune-only", "--allow", "lossy", *words]
    launch = start(AUTODDP, folder, words).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    return launch, json.loads(max(launch.folder.glob(".autoddp/2*/summary.json")).read_text())


def refused(study):
    return {
        (trial["configuration"]["hook"], trial["configuration"].get("powersgd_rank")): trial["reason"]
        for trial in study["trials"]
        if trial["state"] == "refused"
    }


@pytest.mark.whole
def test_float16_overflow_is_refused(tmp_path):
    launch, study = tuned(tmp_path / "jumps", "--job-steps", "700", ODD, "jumps")
    assert list(refused(study)) == [("fp16", None)]
    assert 'not on the ladder: hook="fp16": ' in launch.stderr
    recipe = load(launch.folder / "scripts.odd_gradients.autoddp.toml")
    errors = {entry.rung.value: entry.gradient_error for entry in recipe.ladder}
    assert errors["exact"] is None
    assert 1e-4 < errors["near"] < 0.01
    assert recipe.ladder[-1].configuration["powersgd_start_step"] == 70
    assert all("fp16" not in str(entry.configuration) for entry in recipe.ladder)


@pytest.mark.whole
def test_the_watch_in_the_real_job(tmp_path):
    """Gradients overflow float16 from the 41st step on: that one is mended, from the next on all are exact."""
    words = ["--nproc-per-node", "2", "--trials", "1", "--tune-only", ODD, "noise"]
    tuned = start(AUTODDP, tmp_path / "tuned", words).wait()
    recipe = load(tuned.folder / "scripts.odd_gradients.autoddp.toml")
    save(replace(recipe, configuration=Configuration({"hook": "fp16"}), env={}), tmp_path / "fp16.toml")
    job = ["--nproc-per-node", "2"], [ODD, "large", "--steps", "60", "--from-step", "40"]
    watched, blind, exact = (
        start(command, tmp_path / name, [*job[0], *own, *job[1]])
        for name, command, own in (
            ("watched", AUTODDP, ["--recipe", str(tmp_path / "fp16.toml"), "--watch", "1000"]),
            ("blind", AUTODDP, ["--recipe", str(tmp_path / "fp16.toml"), "--watch", "off"]),
            ("exact", TORCHRUN, []),
        )
    )
    for launch in (watched, blind, exact):
        assert launch.wait().returncode == 0, launch.stderr[-2000:]
    told = "autoddp: warning: back to exact gradients from reduction 42 on: gradients overflow float16"
    assert watched.stderr.count(told) == 1
    assert "back to exact" not in blind.stderr
    expected = torch.load(exact.folder / "rank0.pt")
    for launch in (watched, blind):
        first, second = (torch.load(launch.folder / f"rank{rank}.pt") for rank in range(2))
        for name, value in first.items():
            assert torch.equal(value, second[name])
            assert torch.allclose(value, expected[name], rtol=1e-3)


@pytest.mark.whole
def test_the_watch_belongs_to_the_job(tmp_path):
    """The script builds a new DDP object every 40 steps; the first look is after 50."""
    words = ["--nproc-per-node", "2", "--trials", "1", "--tune-only", ODD, "noise"]
    tuned = start(AUTODDP, tmp_path / "tuned", words).wait()
    recipe = load(tuned.folder / "scripts.odd_gradients.autoddp.toml")
    save(replace(recipe, configuration=Configuration({"hook": "bf16"}), env={}), tmp_path / "bf16.toml")
    job = ["--recipe", str(tmp_path / "bf16.toml"), ODD, "cancel", "--steps", "130", "--rebuild", "40"]
    launch = start(AUTODDP, tmp_path / "job", ["--nproc-per-node", "2", *job]).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    assert launch.stderr.count("back to exact gradients") == 1
    assert "back to exact gradients from reduction 51 on: gradient error " in launch.stderr


@pytest.mark.whole
def test_noise_is_too_much_for_rank_one(tmp_path):
    _, study = tuned(tmp_path / "noise", ODD, "noise")
    assert ("powersgd", 1) in refused(study)
    assert not any(hook in ("fp16", "bf16") for hook, _ in refused(study))
    assert "of a sum over 4 steps, above the lossy rung's limit of 95.00 %" in refused(study)["powersgd", 1]


@pytest.mark.whole
def test_the_user_sets_the_limits(tmp_path):
    _, study = tuned(tmp_path / "noise", "--near-limit", "0.001", "--lossy-limit", "2", ODD, "noise")
    assert list(refused(study)) == [("bf16", None)]
    (row,) = [standing for standing in study["ladder"] if standing["rung"] == "lossy"]
    assert row["error"]["of_sum"] == pytest.approx(1, abs=0.3)
