"""A configuration that fails costs only itself: it is marked with its reason, the study ends, the job is launched."""

import re

import pytest
from launchers import AUTODDP, BRIEF, BRIEF_STUDY, whole, with_limits
from test_tuned_scripts import run, summary

REASONS = {
    "abort": "killed by SIGABRT",
    "raise": "rank 1: RuntimeError: planted: rank 1 cannot train with gradient_as_bucket_view",
    "hang": "hung: for 8 s every rank has waited for another one; rank",
}
SOONER = with_limits({"attempts.job.hang_timeout._LEAST": 8.0, **BRIEF_STUDY})
"""A launcher that takes a trial for hung after 8 s, not after 20."""


@pytest.mark.parametrize("kind", [whole("abort"), whole("raise"), "hang"])
def test_planted_failure(kind, tmp_path):
    launch = run(
        SOONER,
        tmp_path / "run",
        f"planted_failure.py --kind {kind}",
        *("--trials", "2", "--diagnose-budget", "0"),
        env={"TUNED_TIMES_LONGER": "12"},
    )
    assert launch.returncode == 0, launch.stderr[-2000:]
    trials = summary(launch)["trials"]
    assert len(trials) == 2
    failed = [trial for trial in trials if trial["state"] == "failed"]
    assert failed
    assert all("gradient_as_bucket_view" in trial["configuration"] for trial in failed)
    assert REASONS[kind] in failed[0]["reason"]
    assert any(trial["state"] == "measured" for trial in trials)
    assert (launch.folder / "rank0.pt").exists()  # the real job has run
    assert launch.processes() == []


@pytest.mark.whole  # test_tuned_scripts.py has one whose ranks say by an error that they differ
def test_a_script_that_ends_early_without_an_error(tmp_path):
    """After steps without reduction its ranks differ. It notices that, and ends with exit code 0."""
    words, env = ["--trials", "1", "--allow", "exact", "--diagnose-budget", "0"], {"TUNED_TIMES_LONGER": "12"}
    launch = run(BRIEF, tmp_path / "run", "alike.py --quietly --every 4", *words, env=env)
    assert launch.returncode == 0, launch.stderr[-2000:]
    ended = r"the script ended with exit code 0 after \d+ steps, while autoddp tried steps without reduction"
    assert re.search(f"fails in steps without DDP's reduction, or after them: {ended}", launch.stderr), launch.stderr
    assert [trial["state"] for trial in summary(launch)["trials"]] == ["measured"]
    assert (launch.folder / "rank0.pt").exists()


@pytest.mark.whole  # tuning takes half a minute
def test_a_short_script_is_tuned_in_its_own_time(tmp_path):
    """Without --trials, tuning takes no longer than the script, or half a minute, and has an answer all the same."""
    launch = run(AUTODDP, tmp_path / "run", "plain.py --steps 30 --sleep 0.4")
    assert launch.returncode == 0, launch.stderr[-2000:]
    (line,) = [line for line in launch.stderr.splitlines() if line.startswith("autoddp: launching ")]
    assert "your settings stay" in line
    assert summary(launch)["decision"]["configuration"] == {}
    assert (launch.folder / "rank0.pt").exists()


@pytest.mark.whole  # test_tuned_first_steps.py has one that fails later
def test_a_script_that_fails_as_written_fails_as_under_torchrun(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("import torch\nraise ValueError('broken as written')\n")
    launch = run(AUTODDP, tmp_path / "run", str(script), "--trials", "4")
    assert launch.returncode == 1
    assert "not tuned, launching as written: rank" in launch.stderr
    assert "ValueError: broken as written" in launch.stderr
    assert "ChildFailedError" in launch.stderr
    assert launch.processes() == []
