"""The real Slurm: `srun autoddp train.py` on two hosts of a lab, without any flag that says where they are."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from lab import Lab
from launchers import AUTODDP, SCRIPTS, Launch, environment, start, wait_for
from slurm_cluster import Slurm, unavailable

from autoddp.cli.job import run

PLAIN = str(SCRIPTS / "plain.py")
RECIPE = "scripts.plain.autoddp.toml"
QUICK = {"OMP_NUM_THREADS": "1", "TUNED_TIMES_LONGER": "12", "GLOO_SOCKET_IFNAME": "eth0"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := unavailable():
        pytest.skip(f"no Slurm: {reason}")
    with Lab(hosts=2) as hosts, Slurm(hosts, tmp_path_factory.mktemp("slurm")) as found:
        yield found


def launch(cluster: Slurm, folder: Path, before: Sequence[str], *words: str) -> Launch:
    """autoddp with these words, behind what stands `before` it on the command line."""
    bare = {name: value for name, value in environment().items() if not name.startswith("SLURM_")}
    return start(
        [*before, *AUTODDP],
        folder,
        ["--nproc-per-node", "1", *words],
        QUICK,
        popen=lambda argv, env, **rest: cluster.popen(argv, env={**bare, **env}, **rest),
    )


SRUN = ("srun", "-N2", "--overcommit", "--label")


@pytest.mark.lab
def test_a_job_is_tuned_and_the_next_one_uses_its_recipe(
    cluster: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one by srun, the next one by the file that `autoddp job slurm` prints."""
    first = launch(cluster, tmp_path / "job", SRUN, "--trials", "1", "--diagnose-budget", "0", PLAIN).wait()
    before = first.stderr
    assert first.returncode == 0, before[-3000:]
    for node in (0, 1):
        found = (
            f"{node}: autoddp: Slurm: 2 nodes (SLURM_STEP_NUM_NODES), this is node {node} (SLURM_NODEID), the master is"
        )
        assert found in before
    assert "1 trials" in before
    assert first.stdout.count(" trained 120 steps") == 2
    assert (first.folder / RECIPE).exists()
    assert run(["slurm", "--name", "second", "--nproc-per-node", "1", PLAIN]) == 0
    script, output = tmp_path / "job.sh", tmp_path / "printed"
    script.write_text(capsys.readouterr().out)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the script says autoddp, as a user's would
    words = ["--overcommit", f"--output={output}", str(script)]
    second = start(["sbatch"], tmp_path / "job", words, {**QUICK, "PATH": path}, popen=cluster.popen).wait()
    assert second.returncode == 0, second.stderr[len(before) :]
    wait_for(lambda: not cluster.run("squeue", "--noheader", "--name=second"), "the second job's end")
    printed = output.read_text()
    assert printed.count(f"recipe {RECIPE}: launching") == 2, printed[-3000:]
    assert printed.count(" trained 120 steps") == 2, printed[-3000:]
    assert "tuning" not in printed


@pytest.mark.lab
def test_a_batch_script_without_srun_is_refused(cluster: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\n{' '.join([*AUTODDP, PLAIN])}\necho ended with $?\n")
    words = ["-N2", "--overcommit", f"--output={tmp_path / 'printed'}", str(script)]
    job = start(["sbatch"], tmp_path / "job", words, QUICK, popen=cluster.popen).wait()
    assert job.returncode == 0, job.stderr
    output = tmp_path / "printed"
    wait_for(lambda: output.exists() and "ended with" in output.read_text(), "the job's end")
    printed = output.read_text()
    assert "autoddp: error: Slurm: SLURM_NNODES=2, but srun has not started this launcher" in printed
    assert "ended with 2" in printed
    assert printed.count("\n") == 2


@pytest.mark.lab
@pytest.mark.whole
def test_one_task_for_each_rank_is_refused(cluster: Slurm, tmp_path: Path) -> None:
    job = launch(cluster, tmp_path / "job", ["srun", "-N1", "-n2", "--overcommit"], PLAIN).wait()
    assert job.returncode == 2
    assert job.stderr.count("srun has made the ranks already") == 2
    assert "--ntasks-per-node=1" in job.stderr
    assert "Traceback" not in job.stderr


@pytest.mark.lab
def test_scancel_leaves_nothing(cluster: Slurm, tmp_path: Path) -> None:
    """No launcher, keeper or rank runs on, and no mount and no scratch folder is left."""
    mounts = cluster.run("cat", "/proc/mounts")
    (tmp_path / "scratch").mkdir()
    words = ["--trials", "500", "--all-trials", PLAIN]
    before = ["env", f"TMPDIR={tmp_path / 'scratch'}", *SRUN, "--job-name=ended"]
    job = launch(cluster, tmp_path / "job", before, *words)
    wait_for(lambda: "autoddp: trial " in job.stderr or job.process.poll() is not None, "the first trial")
    assert job.process.poll() is None, job.stderr
    assert len(job.processes()) > 4  # two launchers, their keepers, and the ranks
    assert os.listdir(tmp_path / "scratch")
    cluster.run("scancel", "--name=ended")
    job.wait()
    wait_for(lambda: not job.processes(), "all processes to end")
    assert os.listdir(tmp_path / "scratch") == []
    assert cluster.run("cat", "/proc/mounts") == mounts
