"""The summary of a failed job names the exception, the rank and the host, without `@record`."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from launchers import AUTODDP, SCRIPTS, start

from autoddp.knobs import Configuration
from autoddp.recipe import Evidence, Fits, MadeBy, Recipe, save

TORCH = torch.__version__.split("+")[0]


def test_the_cause_is_in_the_summary(tmp_path: Path) -> None:
    recipe = Recipe(
        made_by=MadeBy("0.1.0", TORCH, "3.11.7", "2026-11-20T21:00:00Z"),
        fits=Fits(2, 1, "gloo", ("cpu",), TORCH, 1024, "0123456789abcdef"),
        configuration=Configuration({"bucket_cap_mb": 50}),
        evidence=Evidence(31.21, 0.384, 20, 6, 1234, "the best of what you allow"),
    )
    save(recipe, tmp_path / "r.toml")
    words = ["--nproc-per-node", "2", "--recipe", str(tmp_path / "r.toml"), str(SCRIPTS / "planted_exception.py")]
    launch = start(AUTODDP, tmp_path / "out", words).wait()
    assert launch.returncode == 1
    first = launch.stderr.partition("Root Cause (first observed failure):")[2]
    assert re.search(r"host +: \S", first)
    assert re.search(r"rank +: 1 ", first)
    assert "RuntimeError: planted: rank 1 cannot go on" in first
    assert "error_file: <N/A>" not in first
    assert "tolerated" not in launch.stderr
