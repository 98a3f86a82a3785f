"""Compiled models under --recompile: what is compiled is never timed, and the recipe cuts the job's graphs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from launchers import AUTODDP, SCRIPTS, start

from autoddp.knobs import Configuration
from autoddp.recipe import load, save

SLOW = 0.25  # seconds that each compilation takes, several times as long as a step
WHOLE = {"bucket_cap_mb": 8.0, "optimize_ddp": False}


def launched(folder, *words, script_options=()):
    environment = {"TUNED_TIMES_LONGER": "12", "OMP_NUM_THREADS": "1"}
    words = ["--nproc-per-node", "2", *words, str(SCRIPTS / "compiled.py"), "--width", "1024", *script_options]
    launch = start(AUTODDP, folder, words, environment).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    return launch


@pytest.mark.whole
def test_a_compiled_model_is_tuned_and_launched(tmp_path):
    """Five batch sizes: each turn is followed by five compilations, of which the warm-up sees three at most."""
    words = ("--recompile", "--trials", "4", "--allow", "exact", "--tune-only")
    tuned = launched(tmp_path / "tuned", *words, script_options=("--shapes", "5", "--slow", str(SLOW)))
    study = json.loads(max(tuned.folder.glob(".autoddp/2*/summary.json")).read_text())
    assert study["trials"][0]["configuration"] == WHOLE
    assert "bucket_cap_mb" in study["job"]["left_out"]  # none but the first trials turns it
    assert study["compilations"] >= 10  # five batch sizes at the first turn, and at the turn back
    blocks = [block for trial in (study["baseline"], *study["trials"]) for block in trial["blocks"]]
    blocks += study["finals"]["baseline_rounds"] + [b for one in study["finals"]["finalists"] for b in one["rounds"]]
    assert max(second for block in blocks for second in block) < SLOW

    found = load(tuned.folder / "scripts.compiled.autoddp.toml")
    save(replace(found, configuration=Configuration(WHOLE), env={}), tmp_path / "whole.toml")
    job = launched(tmp_path / "job", "--recipe", str(tmp_path / "whole.toml"))
    assert "rank 0 compiled 1 graphs" in job.stdout  # as written there are a first piece and the rest
