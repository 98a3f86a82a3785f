"""The real Slurm: jobs on two hosts of a lab, without any flag that says where they are."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from lab import Lab
from launchers import AUTODDP, SCRIPTS, Launch, environment, start, unwrapped, wait_for, whole
from slurm_cluster import Slurm, unavailable

from autoddp.cli.job import run
from autoddp.knobs import Configuration
from autoddp.own_code import lines_for
from autoddp.recipe import load

PLAIN = str(SCRIPTS / "plain.py")
RECIPE = "scripts.plain.autoddp.toml"
QUICK = {"OMP_NUM_THREADS": "1", "TUNED_TIMES_LONGER": "12", "GLOO_SOCKET_IFNAME": "eth0"}
ENDLESS = {**QUICK, "TIMES_LONGER": "100000"}
"""The real job goes on until somebody ends it."""
ENDLESS_TRIALS = ("--trials", "500", "--all-trials")
ASKING = 0.3  # seconds between two questions to Slurm, each of which is a process
SIGNALS = {"scancel": (), "scancel --signal=USR1": ("--signal=USR1",)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := unavailable():
        pytest.skip(f"no Slurm: {reason}")
    with Lab(hosts=2) as hosts, Slurm(hosts, tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job that has a recipe, once the first test has tuned it."""
    return tmp_path_factory.mktemp("tuned") / "job"


SRUN = ("srun", "-N2", "--overcommit", "--label")


def launch(
    cluster: Slurm, folder: Path, before: Sequence[str], *words: str, env: dict[str, str] = QUICK, **more: str
) -> Launch:
    """autoddp with these words, behind what stands `before` it on the command line."""
    bare = {name: value for name, value in environment().items() if not name.startswith("SLURM_")}
    return start(
        [*before, *AUTODDP],
        folder,
        ["--nproc-per-node", "1", *words],
        {**env, **more},
        popen=lambda argv, env, **rest: cluster.popen(argv, env={**bare, **env}, **rest),
    )


def submit(
    cluster: Slurm, folder: Path, script: str, *options: str, env: dict[str, str] = QUICK, **more: str
) -> Launch:
    """sbatch with a script that finds autoddp and torchrun as a user's does; the job prints to `{folder}/printed`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.sh").write_text(script)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = ["--overcommit", f"--output={folder / 'printed'}", *options, str(folder / "job.sh")]
    job = start(["sbatch"], folder, words, {**env, "PATH": path, **more}, popen=cluster.popen).wait()
    assert job.returncode == 0, job.stderr
    return job


def printed(folder: Path) -> str:
    """What a job has printed so far; lines that are wrapped are one line again."""
    output = folder / "printed"
    return unwrapped(output.read_text()) if output.exists() else ""


def file_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `autoddp job slurm` prints."""
    assert run(["slurm", *words, "--nproc-per-node", "1", PLAIN]) == 0
    return capsys.readouterr().out


def require_nothing_left(cluster: Slurm, job: Launch, scratch: Path, mounts: str) -> None:
    """No launcher, keeper or rank runs on, and no mount and no scratch folder is left.

    What torchrun leaves behind where a signal ends it are folders of torch's own, such as torchelastic_….
    """
    wait_for(lambda: not job.processes(), "all processes to end")
    assert [name for name in os.listdir(scratch) if not name.startswith("torch")] == []
    assert cluster.run("cat", "/proc/mounts") == mounts


@pytest.mark.lab
def test_a_job_is_tuned(cluster: Slurm, recipe: Path) -> None:
    job = launch(cluster, recipe, SRUN, "--trials", "1", "--diagnose-budget", "0", PLAIN).wait()
    said = unwrapped(job.stderr)
    assert job.returncode == 0, said[-3000:]
    for node in (0, 1):
        found = f"Slurm: 2 nodes (SLURM_STEP_NUM_NODES), this is node {node} (SLURM_NODEID), the master is"
        assert f"{node}: autoddp: {found}" in said
    assert ": 1 trial" in said
    assert job.stdout.count(" trained 120 steps") == 2
    assert (recipe / RECIPE).exists()


@pytest.mark.lab
@pytest.mark.parametrize("ends", [whole("nobody"), whole("scancel"), "scancel --signal=USR1"])
def test_the_next_job_uses_the_recipe_and_leaves_nothing(
    cluster: Slurm, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], ends: str
) -> None:
    """It is submitted by the file that `autoddp job slurm` prints. It ends by itself, or somebody ends it."""
    mounts = cluster.run("cat", "/proc/mounts")
    folder, scratch = tmp_path / "job", tmp_path / "scratch"
    scratch.mkdir()
    shutil.copytree(recipe, folder)
    script = file_of(capsys, "--name", "next")
    job = submit(cluster, folder, script, env=QUICK if ends == "nobody" else ENDLESS, TMPDIR=str(scratch))
    queue = ("squeue", "--noheader", "--name=next")
    if ends != "nobody":
        wait_for(lambda: len(job.training(PLAIN)) == 2 or not cluster.run(*queue), "the real job", ASKING)
        cluster.run("scancel", *SIGNALS[ends], "--name=next")
    wait_for(lambda: not cluster.run(*queue), "the job's end", ASKING)
    found = printed(folder)
    assert found.count(f"recipe {RECIPE}: launching") == 2, found[-3000:]
    assert "tuning" not in found
    if ends == "nobody":
        assert found.count(" trained 120 steps") == 2, found[-3000:]
    require_nothing_left(cluster, job, scratch, mounts)


@pytest.mark.lab
@pytest.mark.parametrize("ends", ["scancel", whole("scancel --signal=USR1")])
def test_a_job_that_is_ended_in_its_trials_leaves_nothing(cluster: Slurm, tmp_path: Path, ends: str) -> None:
    mounts = cluster.run("cat", "/proc/mounts")
    (tmp_path / "scratch").mkdir()
    before = ["env", f"TMPDIR={tmp_path / 'scratch'}", *SRUN, "--job-name=ended"]
    job = launch(cluster, tmp_path / "job", before, *ENDLESS_TRIALS, PLAIN)
    wait_for(lambda: "autoddp: trial " in job.stderr or job.process.poll() is not None, "the first trial")
    assert job.process.poll() is None, job.stderr
    assert len(job.processes()) > 4  # two launchers, their keepers, and the ranks
    assert os.listdir(tmp_path / "scratch")
    cluster.run("scancel", *SIGNALS[ends], "--name=ended")
    job.wait()
    require_nothing_left(cluster, job, tmp_path / "scratch", mounts)


@pytest.mark.lab
@pytest.mark.whole  # test_place.py has it on the recorded environment of a batch script
def test_a_batch_script_without_srun_is_refused(cluster: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    submit(cluster, folder, f"#!/bin/sh\n{' '.join([*AUTODDP, PLAIN])}\necho ended with $?\n", "-N2")
    wait_for(lambda: "ended with" in printed(folder), "the job's end")
    said = printed(folder)
    assert "autoddp: error: Slurm: SLURM_NNODES=2, but srun has not started this launcher" in said
    assert "ended with 2" in said
    assert said.count("\n") == 2


@pytest.mark.lab
@pytest.mark.whole
def test_one_task_for_each_rank_is_refused(cluster: Slurm, tmp_path: Path) -> None:
    job = launch(cluster, tmp_path / "job", ["srun", "-N1", "-n2", "--overcommit"], PLAIN).wait()
    assert job.returncode == 2
    assert job.stderr.count("srun has made the ranks already") == 2
    assert "--ntasks-per-node=1" in job.stderr
    assert "Traceback" not in job.stderr


@pytest.mark.lab
@pytest.mark.whole
def test_the_recipe_as_a_batch_script_trains_without_autoddp(cluster: Slurm, recipe: Path, tmp_path: Path) -> None:
    """What `autoddp recipe code FILE --for slurm` prints, as it is printed."""
    folder = tmp_path / "job"
    shutil.copytree(SCRIPTS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    settings = Configuration(
        {"malloc": "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=4294967296"}
    )
    found = replace(load(recipe / RECIPE), configuration=settings, env={"OMP_NUM_THREADS": "1"})
    script = lines_for(found, RECIPE, "slurm").text
    submit(cluster, folder, script, "--job-name=own", f"--chdir={folder}", OUT=str(folder))
    wait_for(lambda: not cluster.run("squeue", "--noheader", "--name=own"), "the job's end", ASKING)
    said = printed(folder)
    assert said.count(" trained 120 steps") == 2, said[-3000:]
    assert sorted(path.name for path in folder.glob("rank*.pt")) == ["rank0.pt", "rank1.pt"]


@pytest.mark.lab
@pytest.mark.whole
def test_a_time_limit_leaves_nothing_and_the_next_job_goes_on(
    cluster: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm's shortest limit is a minute, and it looks twice a minute."""
    mounts = cluster.run("cat", "/proc/mounts")
    folder, scratch = tmp_path / "job", tmp_path / "scratch"
    scratch.mkdir()
    script = file_of(capsys, "--name", "limited", "--time", "1", *ENDLESS_TRIALS, "--budget", "1h")
    job = submit(cluster, folder, script, TMPDIR=str(scratch))
    wait_for(lambda: not cluster.run("squeue", "--noheader", "--name=limited"), "the time limit", ASKING)
    assert "DUE TO TIME LIMIT" in printed(folder)
    assert "autoddp: trial " in printed(folder)
    require_nothing_left(cluster, job, scratch, mounts)
    before = len(printed(folder))
    job = submit(cluster, folder, script, "--open-mode=append", TMPDIR=str(scratch))
    wait_for(lambda: "going on with the tuning run" in printed(folder)[before:], "the study to go on")
    cluster.run("scancel", "--name=limited")
    require_nothing_left(cluster, job, scratch, mounts)


@pytest.mark.lab
@pytest.mark.whole
@pytest.mark.parametrize("when", ["trials", "real job"])
def test_a_job_that_is_requeued_goes_on(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], when: str
) -> None:
    if reason := unavailable():
        pytest.skip(f"no Slurm: {reason}")
    with Lab(hosts=2) as hosts, Slurm(hosts, tmp_path / "slurm", requeues=True) as cluster:
        folder = tmp_path / "job"
        if when == "real job":
            shutil.copytree(recipe, folder)
        options = ENDLESS_TRIALS if when == "trials" else ()
        script = file_of(capsys, "--name", "again", *options)
        job = submit(cluster, folder, script, "--requeue", "--open-mode=append", env=ENDLESS)
        number = cluster.run("squeue", "--noheader", "--name=again", "--format=%i").strip()
        begun = (
            (lambda: "autoddp: trial " in printed(folder))
            if when == "trials"
            else (lambda: len(job.training(PLAIN)) == 2)
        )
        wait_for(begun, f"the {when}")
        cluster.run("scontrol", "requeue", number)
        wait_for(lambda: not job.processes(), "all processes to end")
        before = len(printed(folder))
        goes_on = "going on with the tuning run" if when == "trials" else f"recipe {RECIPE}: launching"
        wait_for(lambda: goes_on in printed(folder)[before:], "the job to start again")
        cluster.run("scancel", number)
        wait_for(lambda: not job.processes(), "all processes to end")
