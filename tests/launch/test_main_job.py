"""The main job in short (benchmarks/main_job.py has it in full): a short script is tuned, and launched with its gain.

Also where nothing can be gained, and where the script is so short that its time is over before anything is decided.
"""

from __future__ import annotations

import functools
import json
import time

import pytest
from launchers import AUTODDP, BRIEF, ROOT, SCRIPTS, TORCHRUN, start
from test_tuned_hosts import rendezvous
from test_tuned_scripts import run, summary

MLP = str(ROOT / "benchmarks" / "jobs" / "mlp.py")
SIZE = ["--width", "720", "--depth", "1", "--batch", "1", "--steps", "60"]  # hardly more than 2 MiB that travel


def step_seconds(hosts, command, parent, *words):
    """The shortest step of the job on both hosts, which ends well; and what the launcher of host 0 has said.

    A busy machine makes steps longer, the median too; none is shorter than what its bytes take on the link.
    """
    env = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    words = ("--nnodes", "2", "--nproc-per-node", "1", *words, "--times", "times.json")
    launches = [
        start(
            command,
            parent / f"host{host}",
            [*rendezvous(hosts, "c10d", host), *words],
            env,
            popen=functools.partial(hosts.fork, host),
        )
        for host in range(2)
    ]
    assert [launch.wait().returncode for launch in launches] == [0, 0], launches[0].stderr[-2000:]
    times = json.loads((launches[0].folder / "times.json").read_text())
    return min(times[0][5:]), launches[0].stderr


@pytest.mark.lab
def test_a_script_of_sixty_steps_gets_its_gain(lab, tmp_path):
    """The study needs more steps than the script has: it is started again, and a round that it cuts is made again."""
    hosts = lab(hosts=2, rate="100mbit")  # 2 MiB take 170 ms, far more than a busy machine adds
    options = ["--trials", "2", "--diagnose-budget", "0"]
    launched, said = step_seconds(hosts, AUTODDP, tmp_path / "autoddp", *options, MLP, *SIZE)
    as_written, _ = step_seconds(hosts, TORCHRUN, tmp_path / "torchrun", MLP, *SIZE, "--steps", "20")
    assert "the best of what you allow (near): ×" in said
    assert as_written / launched >= 1.3  # half as many bytes
    assert (tmp_path / "autoddp/host0/jobs.mlp.autoddp.toml").exists()
    assert len(list(tmp_path.glob("autoddp/host0/.autoddp/2*/attempt*"))) > 1


def test_a_job_that_gains_nothing_is_launched_as_written(tmp_path):
    options = ["--trials", "1", "--diagnose-budget", "0"]
    launch = run(BRIEF, tmp_path / "run", "plain.py --steps 60 --sleep 0.05", *options)
    assert launch.returncode == 0, launch.stderr[-2000:]
    assert "your settings stay" in launch.stderr
    assert summary(launch)["decision"]["configuration"] == {}
    assert (launch.folder / "rank0.pt").exists()


def test_a_script_that_is_too_short_ends_within_its_time_with_one_line(tmp_path):
    """Fifteen steps, of which nine can be measured, within 5 s: as written, and what would decide it."""
    began = time.monotonic()
    words = ["--nproc-per-node", "2", "--budget", "5s", str(SCRIPTS / "plain.py"), "--steps", "15"]
    launch = start(AUTODDP, tmp_path / "run", words).wait()
    print(f"{time.monotonic() - began:.1f} s")
    assert launch.returncode == 0, launch.stderr[-2000:]
    (line,) = [line for line in launch.stderr.splitlines() if "launching" in line]
    assert "launching as written: " in line
    assert "--budget" in line or "8 are needed" in line
    assert not list(launch.folder.glob("*.toml"))
    # Where a busy machine has not built the model within the budget, there is nothing to sum up.
    summed_up = list(launch.folder.glob(".autoddp/2*/summary.json"))
    assert (summary(launch)["decision"]["why"] if summed_up else "the --budget of 5 s is over") in line
    assert (launch.folder / "rank0.pt").exists()
