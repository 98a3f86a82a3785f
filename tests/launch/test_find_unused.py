"""find_unused_parameters: static_graph ends the search, if the user allows that the job stops where one is unused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from launchers import BRIEF, SCRIPTS, SEVERAL, start
from scripts.several import folder_of

from autoddp.knobs import Configuration
from autoddp.recipe import load, save

STATIC = {"static_graph": True}
LATER = "unused.py --from-step 12"
PROBES = "unused.py --probes-from 12"


TUNED = ("--static-graph", "--trials", "1", "--allow", "exact", "--tune-only", "--diagnose-budget", "0")


def launched(folder, *words, script="unused.py"):
    name, *options = script.split()
    return launched_as(folder, *words, str(SCRIPTS / name), *options)


def launched_as(folder, *words):
    words = ["--nproc-per-node", "2", *words]
    return start(BRIEF, folder, words, {"TUNED_TIMES_LONGER": "1000", "OMP_NUM_THREADS": "1"}).wait()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A short study."""
    launch = launched(tmp_path_factory.mktemp("tuned") / "out", *TUNED)
    assert launch.returncode == 0, launch.stderr[-2000:]
    return launch


@pytest.fixture(scope="module")
def recipe(tuned, tmp_path_factory):
    """A recipe that sets static_graph alone."""
    found = load(tuned.folder / "scripts.unused.autoddp.toml")
    assert found.fits.find_unused_parameters  # by that the job may go on without the search
    path = tmp_path_factory.mktemp("recipe") / "static.toml"
    save(replace(found, configuration=Configuration(STATIC), env={}), path)
    return path


def test_static_graph_is_tried_first(tuned):
    study = json.loads(max(tuned.folder.glob(".autoddp/2*/summary.json")).read_text())
    assert study["trials"][0]["configuration"]["static_graph"]  # with what predictions add to it
    assert study["trials"][0]["state"] != "failed"


BY_TORCHRUN = {
    "test_the_job_trains_the_same": lambda: ["unused.py"],
    "test_a_pass_that_gives_no_gradients_stops_no_job": lambda: [PROBES],
}


@pytest.fixture(scope="module")
def job(recipe, tmp_path_factory):
    """Both scripts under the recipe, in one launch, a folder each."""
    folder = tmp_path_factory.mktemp("job") / "out"
    job = launched_as(folder, "--recipe", str(recipe), SEVERAL, "unused.py", PROBES)
    assert job.returncode == 0, job.stderr[-2000:]
    return job


def trained_alike(job, by_torchrun, script):
    for rank in (0, 1):
        found, expected = (torch.load(f / folder_of(script) / f"rank{rank}.pt") for f in (job.folder, by_torchrun))
        assert expected
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_job_trains_the_same(job, by_torchrun):
    trained_alike(job, by_torchrun, "unused.py")
    assert "find_unused_parameters" not in job.stderr  # torch warns of it beside a static graph


def test_a_parameter_that_is_unused_later_stops_the_job_at_once(recipe, tmp_path):
    """Else rank 1 would step by its own gradients, while rank 0 waits for the bucket of that parameter."""
    job = launched(tmp_path / "job", "--recipe", str(recipe), "--force", script=LATER)
    assert job.returncode == 1
    assert "the recipe's static_graph needs the gradients of all parameters in each step" in job.stderr
    assert f"take static_graph out of {recipe}, from [configuration] and from each [[ladder]]" in job.stderr
    assert "tune again" not in job.stderr  # which would find it again
    assert not list(job.folder.glob("rank*.pt"))


def test_a_pass_that_gives_no_gradients_stops_no_job(job, by_torchrun):
    """`torch.autograd.grad` begins at the model's output and gives none; the pass after it gives all."""
    trained_alike(job, by_torchrun, PROBES)
