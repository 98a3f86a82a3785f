"""The gradient error, measured on the live job: on the ladder, in the recipe, and refused above the limit."""

from __future__ import annotations

import json

import pytest
from launchers import AUTODDP, SCRIPTS, start

from autoddp.recipe import load

ODD = str(SCRIPTS / "odd_gradients.py")


def tuned(folder, *words):
    words = ["--nproc-per-node", "2", "--trials", "16", "--tune-only", "--allow", "lossy", *words]
    launch = start(AUTODDP, folder, words).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    return launch, json.loads(max(launch.folder.glob(".autoddp/*/summary.json")).read_text())


def refused(study):
    return {
        (trial["configuration"]["hook"], trial["configuration"].get("powersgd_rank")): trial["reason"]
        for trial in study["trials"]
        if trial["state"] == "refused"
    }


def test_float16_overflow_is_refused(tmp_path):
    launch, study = tuned(tmp_path / "large", ODD, "large")
    assert list(refused(study)) == [("fp16", None)]
    assert 'not on the ladder: hook="fp16": ' in launch.stderr
    recipe = load(launch.folder / "odd_gradients.autoddp.toml")
    errors = {entry.rung.value: entry.gradient_error for entry in recipe.ladder}
    assert errors["exact"] is None
    assert 1e-4 < errors["near"] < 0.01
    assert errors["lossy"] < 0.01  # of rank one
    assert all("fp16" not in str(entry.configuration) for entry in recipe.ladder)


def test_noise_is_too_much_for_rank_one(tmp_path):
    _, study = tuned(tmp_path / "noise", ODD, "noise")
    assert ("powersgd", 1) in refused(study)
    assert not any(hook in ("fp16", "bf16") for hook, _ in refused(study))
    assert "of a sum over 4 steps, above the lossy rung's limit of 95.00%" in refused(study)["powersgd", 1]


def test_the_user_sets_the_limits(tmp_path):
    _, study = tuned(tmp_path / "noise", "--near-limit", "0.001", "--lossy-limit", "2", ODD, "noise")
    assert list(refused(study)) == [("bf16", None)]
    (row,) = [standing for standing in study["ladder"] if standing["rung"] == "lossy"]
    assert row["error"]["of_sum"] == pytest.approx(1, abs=0.3)
