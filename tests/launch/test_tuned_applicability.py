"""What cannot be here is not tried, with the reason; a recipe with CUDA graphs runs as written without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from launchers import BRIEF, SCRIPTS, TORCHRUN, start, whole

from autoddp.knobs import Configuration
from autoddp.recipe import load, save

SCRIPT = [str(SCRIPTS / "large_batch.py"), "--clears", "by hand"]


def launched(folder, *words):
    environment = {"TUNED_TIMES_LONGER": "1000"}
    launch = start(BRIEF, folder, ["--nproc-per-node", "2", *words, *SCRIPT], environment).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    return launch


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Asked for what this machine and this script cannot have."""
    words = ["--cuda-graphs", "--accumulate-up-to", "4", "--trials", "1", "--tune-only", "--diagnose-budget", "0"]
    return launched(tmp_path_factory.mktemp("tuned") / "out", *words)


@pytest.mark.parametrize(
    ("knob", "why"),
    [
        ("cuda_graphs", "the models are not on a GPU"),
        ("accumulate_steps", "the script clears gradients without zero_grad"),
    ],
)
def test_not_offered(tuned, knob, why):
    study = json.loads(max(tuned.folder.glob(".autoddp/2*/summary.json")).read_text())
    assert study["job"]["left_out"][knob] == why
    assert all(knob not in trial["configuration"] for trial in study["trials"])


def test_a_recipe_with_cuda_graphs(tuned, tmp_path):
    found = load(tuned.folder / "scripts.large_batch.autoddp.toml")
    asked = Configuration({"gradient_as_bucket_view": True, "cuda_graphs": "model"})
    save(replace(found, configuration=asked, env={}), tmp_path / "graphs.toml")
    job = launched(tmp_path / "job", "--recipe", str(tmp_path / "graphs.toml"))
    assert "autoddp: without CUDA graphs, as written: " in job.stderr
    assert "Traceback" not in job.stderr


def test_ranks_that_the_script_has_started_are_not_tuned(tmp_path):
    """They would take no orders, and all would wait for each other."""
    words = ["--nproc-per-node", "2", "--trials", "2", "--tune-only", str(SCRIPTS / "own_ranks.py")]
    launch = start(BRIEF, tmp_path / "out", words).wait()
    assert "no recipe was written: the script trains with 4 ranks, and autoddp has started 2" in launch.stderr
    assert launch.processes() == []


@pytest.mark.parametrize("ranks", [whole(3)])  # it waits for a minute
def test_a_job_in_which_a_rank_trains_nothing_runs_as_written(ranks, tmp_path):
    """The others would wait for that rank's steps, for half an hour or for ever."""
    words = ["--nproc-per-node", str(ranks)]
    script = str(SCRIPTS / "learners.py")
    plain = start(TORCHRUN, tmp_path / "torchrun", [*words, script]).wait()
    launch = start(BRIEF, tmp_path / "out", [*words, "--trials", "2", script]).wait()
    assert "not tuned, launching as written: rank 0 has not trained a DDP model" in launch.stderr
    assert launch.returncode == plain.returncode == 0
    left = [[torch.load(of.folder / f"rank{rank}.pt") for rank in range(ranks)] for of in (plain, launch)]
    assert all(torch.equal(a[name], b[name]) for a, b in zip(*left, strict=True) for name in a | b)
