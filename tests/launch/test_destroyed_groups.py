"""A real job ends although its script destroys the process group before the DDP object; see docs/architecture.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launchers import AUTODDP, SCRIPTS, start

from autoddp.knobs import Configuration
from autoddp.recipe import Evidence, Fits, MadeBy, Recipe, save
from autoddp.worker.ddp.model import parameters_digest

SCRIPT = str(SCRIPTS / "destroys_its_group_first.py")
MODEL = torch.nn.Linear(64, 64)
"""That of the script."""
VERSION = torch.__version__.split("+")[0]


@pytest.mark.parametrize("knobs", [{"gradient_as_bucket_view": True}, {"hook": "fp16"}], ids=["", "hook"])
def test_a_job_with_a_recipe_ends(tmp_path: Path, knobs: dict[str, Any]) -> None:
    """Under torch 2.13 alone the same script hangs nearly every time."""
    fits = Fits(1, 1, "gloo", ("cpu",), VERSION, 16640, parameters_digest(MODEL))
    made_by = MadeBy("0.1.0", VERSION, "3.11.7", "2026-01-01T00:00:00Z", "")
    evidence = Evidence(31.0, 0.1, 20, 6, 100, "the best of what you allow")
    (tmp_path / "job").mkdir()
    recipe = Recipe(made_by, fits, Configuration(knobs), evidence)
    save(recipe, tmp_path / "job" / "recipe.toml")
    words = ["--recipe", "recipe.toml", "--force", "--nproc-per-node", "1", SCRIPT]
    launch = start(AUTODDP, tmp_path / "job", words).wait()
    assert launch.returncode == 0, launch.stderr
    assert launch.stdout.splitlines() == ["threads of gloo: 0", "threads of gloo: 0", "the end"]
