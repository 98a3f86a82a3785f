"""--local-buffers: DDP broadcasts no buffers, where training does not read them; rank 0's checkpoint stays the same."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from launchers import AUTODDP, BRIEF, SCRIPTS, SEVERAL, chosen, start, whole
from scripts.several import folder_of

from autoddp.knobs import Configuration, FirstLook, ObservedSteps, Rung, why_left_out
from autoddp.recipe import load, save

LOCAL = {"broadcast_buffers": False}
EVALUATES = "batch_norm.py --evaluates"
FREEZES = "batch_norm.py --freezes 12 --evaluates"
OTHER_INPUTS = "batch_norm.py --samples 4 --evaluates"
JOINS = ["batch_norm.py --joins 8", "batch_norm.py --joins 0"]
WITH_A_QUEUE = "batch_norm.py --queue"


ONE_TRIAL = ("--trials", "1", "--tune-only", "--diagnose-budget", "0")


def launched(folder, *words, script="batch_norm.py"):
    name, *options = script.split()
    return launched_as(folder, *words, str(SCRIPTS / name), *options)


def launched_as(folder, *words, command=BRIEF):
    words = ["--nproc-per-node", "2", *words]
    launch = start(command, folder, words, {"TUNED_TIMES_LONGER": "1000", "OMP_NUM_THREADS": "1"}).wait()
    assert launch.returncode == 0, launch.stderr[-2000:]
    return launch


def study_of(launch):
    return json.loads(max(launch.folder.glob(".autoddp/2*/summary.json")).read_text())


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A study that was asked for it."""
    words = ("--local-buffers", "--trials", "8", "--tune-only", "--diagnose-budget", "0")
    folder = tmp_path_factory.mktemp("tuned") / "out"  # what a brief study finds fastest may be anything
    return launched_as(folder, *words, str(SCRIPTS / "batch_norm.py"), command=AUTODDP)


@pytest.fixture(scope="module")
def recipe(tuned, tmp_path_factory):
    """A recipe that sets this knob alone."""
    found = load(tuned.folder / "scripts.batch_norm.autoddp.toml")
    path = tmp_path_factory.mktemp("recipe") / "local.toml"
    save(replace(found, configuration=Configuration(LOCAL), env={}), path)
    return path


def test_it_is_tried_without_a_hook_and_needs_no_gradient_error(tuned):
    trials = [trial for trial in study_of(tuned)["trials"] if "broadcast_buffers" in trial["configuration"]]
    assert 1 <= len(trials) <= 2  # on top of the fastest configuration, and of the fastest exact one
    assert all(trial["state"] != "failed" and trial["rung"] == Rung.NEAR.value for trial in trials)
    without_hook = next(trial for trial in trials if "hook" not in trial["configuration"])
    assert without_hook["error"] is None


def states(folder):
    return [torch.load(folder / f"rank{rank}.pt") for rank in (0, 1)]


def differing(found, expected):
    assert found.keys() == expected.keys()
    return {name for name in expected if not torch.equal(found[name], expected[name])}


RANK_0 = "test_rank_0_is_as_under_torchrun"
AGAIN = "test_buffers_travel_again_where_training_reads_them"
BY_TORCHRUN = {
    RANK_0: lambda script: [script],
    AGAIN: lambda script: [script],
    "test_a_job_with_other_inputs_is_as_written_again": lambda script: [script],
}


@pytest.fixture(scope="module")
def job(request, recipe, tmp_path_factory):
    """The scripts under the recipe, all in one launch, a folder each. Some ranks see no inputs: so --force."""
    commands = [*chosen(request, RANK_0, "script"), *chosen(request, AGAIN, "script")]
    return launched_as(tmp_path_factory.mktemp("job") / "out", "--recipe", str(recipe), "--force", SEVERAL, *commands)


@pytest.mark.parametrize("script", [whole("batch_norm.py"), EVALUATES])
def test_rank_0_is_as_under_torchrun(script, job, by_torchrun):
    """Rank 1 has the same parameters, and running statistics of its own batches that began with those of rank 0."""
    found, expected = states(job.folder / folder_of(script)), states(by_torchrun / folder_of(script))
    assert differing(found[0], expected[0]) == set()
    assert differing(found[1], expected[1]) == {"0.module.0.running_mean", "0.module.0.running_var"}
    # Of the 50 with which rank 0 began, and which DDP's constructor has sent to rank 1. Its own inputs are about 1.
    left = 50 * 0.9**24
    assert abs(float(found[1]["0.module.0.running_mean"].mean()) - left - 1) < 0.4
    assert "deprecated" not in job.stderr


# Script → why its buffers travel again
READS = {
    FREEZES: "BatchNorm computes with its running statistics",
    WITH_A_QUEUE: "training may read the buffer queue: it belongs to no BatchNorm",
    JOINS[0]: "the script uses join()",
    JOINS[1]: "the script uses join()",
}


@pytest.mark.parametrize("script", [FREEZES, WITH_A_QUEUE, JOINS[0], whole(JOINS[1])])
def test_buffers_travel_again_where_training_reads_them(script, job, by_torchrun, request):
    """A recipe is bound to the parameters, not to the buffers nor to the loop around it."""
    found, expected = states(job.folder / folder_of(script)), states(by_torchrun / folder_of(script))
    assert [differing(*pair) for pair in zip(found, expected, strict=True)] == [set(), set()]
    alike = [one for one in chosen(request, AGAIN, "script") if READS[one] == READS[script]]
    said = f"the recipe's broadcast_buffers is left out from here on: {READS[script]}"
    assert job.stderr.count(said) == len(alike)
    assert job.stderr.count("is left out from here on: ") == len(chosen(request, AGAIN, "script"))


@pytest.mark.parametrize("script", [OTHER_INPUTS])
def test_a_job_with_other_inputs_is_as_written_again(script, recipe, by_torchrun, tmp_path):
    """From the second training pass on."""
    job = launched(tmp_path / "job", "--recipe", str(recipe), script=script)
    found, expected = states(job.folder), states(by_torchrun / folder_of(script))
    assert [differing(*pair) for pair in zip(found, expected, strict=True)] == [set(), set()]
    assert "was made for another job" in job.stderr


def left_out(buffer_bytes, why_alike=""):
    """Why a job with such buffers is not offered it, though it was asked for; None where it is offered."""
    seen = {"is_static": True, "forwards": (1,), "steps_by_closure": False, "clears": True, "one_optimizer": True}
    steps = ObservedSteps(**seen, why_no_graphs={})
    asked = {"options": frozenset({"--local-buffers"}), "buffer_bytes": buffer_bytes, "why_buffers_alike": why_alike}
    look = FirstLook([steps], frozenset({"cpu"}), "2", frozenset({"broadcast_buffers"}), [{}], **asked)
    return why_left_out(look).get("broadcast_buffers")


def test_it_is_left_out_for_the_reason_that_the_ranks_have_found():
    assert left_out(8) is None
    assert left_out(8, READS[WITH_A_QUEUE]) == READS[WITH_A_QUEUE]
    assert left_out(0) == "DDP broadcasts no buffers here"


@pytest.mark.whole  # the reasons are seen above, in a job, and what is left out for them
@pytest.mark.parametrize(
    ("words", "script", "why"),
    [
        (["--local-buffers"], WITH_A_QUEUE, "training may read the buffer queue: it belongs to no BatchNorm"),
        (["--local-buffers"], "plain.py --steps 24", "DDP broadcasts no buffers here"),
        ([], "batch_norm.py", None),
    ],
)
def test_not_offered(words, script, why, tmp_path):
    study = study_of(launched(tmp_path / "out", *words, *ONE_TRIAL, script=script))
    assert study["job"]["left_out"].get("broadcast_buffers") == why
    assert not any("broadcast_buffers" in trial["configuration"] for trial in study["trials"])
