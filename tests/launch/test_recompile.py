"""Compiled models under --recompile: what is compiled is never timed, and the recipe cuts the job's graphs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from launchers import AUTODDP, SCRIPTS, start

from autoddp.knobs import Configuration
from autoddp.recipe import load, save

SLOW = 0.4  # seconds that each compilation takes; a step takes a hundredth of it


def launched(folder, *words, script_options=()):
    environment = {"TUNED_TIMES_LONGER": "12", "OMP_NUM_THREADS": "1"}
    words = ["--nproc-per-node", "2", *words, str(SCRIPTS / "compiled.py"), "--width", "1024", *script_options]
    launch = start(AUTODDP, folder, words, environment).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    return launch


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Five batch sizes: each turn is followed by five compilations, of which the warm-up sees three at most."""
    shapes = ("--shapes", "5", "--slow", str(SLOW))
    words = ("--recompile", "--trials", "8", "--allow", "exact", "--tune-only")
    return launched(tmp_path_factory.mktemp("tuned") / "run", *words, script_options=shapes)


def test_what_is_compiled_is_not_timed(tuned):
    study = json.loads(max(tuned.folder.glob(".autoddp/*/summary.json")).read_text())
    first = study["trials"][0]["configuration"]
    assert first == {"bucket_cap_mb": 8.0, "optimize_ddp": False}
    assert "bucket_cap_mb" in study["job"]["left_out"]  # none but those first trials turns it
    assert study["compilations"] >= 10  # five batch sizes at the first turn, and at the turn back
    trials = [study["baseline"], *study["trials"]]
    blocks = [block for trial in trials for block in trial["blocks"]] + study["finals"]["baseline_rounds"]
    assert max(second for block in blocks for second in block) < SLOW


@pytest.mark.parametrize(("configuration", "graphs"), [({}, 2), ({"optimize_ddp": False, "bucket_cap_mb": 8.0}, 1)])
def test_the_recipe_cuts_the_jobs_graphs(configuration, graphs, tuned, tmp_path):
    found = load(tuned.folder / "compiled.autoddp.toml")
    save(replace(found, configuration=Configuration(configuration), env={}), tmp_path / "cut.toml")
    job = launched(tmp_path / "job", "--recipe", str(tmp_path / "cut.toml"))
    assert f"rank 0 compiled {graphs} graphs" in job.stdout
