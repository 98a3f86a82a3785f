"""A configuration that fails costs only itself: it is marked with its reason, the study ends, the job is launched."""

import re

import pytest
from launchers import AUTODDP, whole
from test_tuned_scripts import run, summary

REASONS = {
    "abort": "killed by SIGABRT",
    "raise": "rank 1: RuntimeError: planted: rank 1 cannot train with gradient_as_bucket_view",
    "hang": "hung: for 20 s every rank has waited for another one; rank",
}


@pytest.mark.parametrize("kind", [whole("abort"), whole("raise"), "hang"])
def test_planted_failure(kind, tmp_path):
    launch = run(
        AUTODDP,
        tmp_path / "run",
        f"planted_failure.py --kind {kind}",
        "--trials",
        "4",
        env={"TUNED_TIMES_LONGER": "12"},
    )
    assert launch.returncode == 0, launch.stderr[-2000:]
    trials = summary(launch)["trials"]
    assert len(trials) == 4
    failed = [trial for trial in trials if trial["state"] == "failed"]
    assert failed
    assert all("gradient_as_bucket_view" in trial["configuration"] for trial in failed)
    assert REASONS[kind] in failed[0]["reason"]
    assert any(trial["state"] == "measured" for trial in trials)
    assert (launch.folder / "rank0.pt").exists()  # the real job has run
    assert launch.processes() == []


def test_a_script_that_ends_early_without_an_error(tmp_path):
    """After steps without reduction its ranks differ. It notices that, and ends with exit code 0."""
    # Without a budget, a busy machine could end tuning after 30 s, before the third start has ended.
    words, env = ["--trials", "4", "--budget", "10m"], {"TUNED_TIMES_LONGER": "12"}
    launch = run(AUTODDP, tmp_path / "run", "alike.py --quietly", *words, env=env)
    assert launch.returncode == 0, launch.stderr[-2000:]
    ended = r"the script ended with exit code 0 after [12]0 steps, (while|after) autoddp (had )?tried"
    why = rf"not tuned, launching as written: {ended} steps without reduction; 3 starts have ended"
    assert re.search(why, launch.stderr), launch.stderr
    assert "as long as the script" not in launch.stderr
    assert (launch.folder / "rank0.pt").exists()


@pytest.mark.whole  # tuning takes half a minute at least
def test_a_script_that_ends_within_a_trial(tmp_path):
    """Whether that is its usual end is not known, so the reason says what was seen."""
    env = {"TUNED_TIMES_LONGER": "30"}
    launch = run(AUTODDP, tmp_path / "run", "plain.py --steps 30 --sleep 0.03", "--trials", "1000", env=env)
    assert launch.returncode == 0, launch.stderr[-2000:]
    ended = r"tuning has taken [34]\d s, and a start of the script no longer: the script ended with exit code 0"
    assert re.search(rf"{ended} after 900 steps, (while|after) autoddp (had )?tried \w+", launch.stderr), launch.stderr


def test_a_script_that_fails_as_written_fails_as_under_torchrun(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("import torch\nraise ValueError('broken as written')\n")
    launch = run(AUTODDP, tmp_path / "run", str(script), "--trials", "4")
    assert launch.returncode == 1
    assert "not tuned, launching as written: rank" in launch.stderr
    assert "ValueError: broken as written" in launch.stderr
    assert "ChildFailedError" in launch.stderr
    assert launch.processes() == []
