"""The summary of a failed job names the exception, the rank and the host, without `@record`."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from launchers import AUTODDP, SCRIPTS, Launch, start

from autoddp.knobs import Configuration
from autoddp.recipe import Evidence, Fits, MadeBy, Recipe, save

TORCH = torch.__version__.split("+")[0]


def run(script: Path, folder: Path, *options: str) -> Launch:
    """The script's job with a recipe, to its end."""
    recipe = Recipe(
        made_by=MadeBy("0.1.0", TORCH, "3.11.7", "2026-11-20T21:00:00Z"),
        fits=Fits(2, 1, "gloo", ("cpu",), TORCH, 1024, "0123456789abcdef"),
        configuration=Configuration({"bucket_cap_mb": 50}),
        evidence=Evidence(31.21, 0.384, 20, 6, 1234, "the best of what you allow"),
    )
    save(recipe, folder / "r.toml")
    words = ["--nproc-per-node", "2", "--recipe", str(folder / "r.toml"), *options, str(script)]
    return start(AUTODDP, folder / "out", words).wait()


def test_the_cause_is_in_the_summary(tmp_path: Path) -> None:
    launch = run(SCRIPTS / "planted_exception.py", tmp_path)
    assert launch.returncode == 1
    first = launch.stderr.partition("Root Cause (first observed failure):")[2]
    assert re.search(r"host +: \S", first)
    assert re.search(r"rank +: 1 ", first)
    assert "RuntimeError: planted: rank 1 cannot go on" in first
    assert "error_file: <N/A>" not in first
    assert "tolerated" not in launch.stderr


FAILS_ONCE = """
import os, resource
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # each write fails, as on a full disk
    raise RuntimeError("the first start")
print("trained")
"""


def test_a_cause_that_cannot_be_written_costs_no_restart(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILS_ONCE)
    launch = run(script, tmp_path, "--max-restarts", "1")
    assert launch.returncode == 0, launch.stderr
    assert launch.stdout == "trained\n" * 2
