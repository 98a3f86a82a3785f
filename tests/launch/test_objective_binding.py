"""`--objective` on a host with two NUMA nodes: a script without DDP is kept on them, in its trials and in its job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launchers import AUTODDP, may_mount, on_numa_nodes, popen_behind, start

from autoddp.recipe import load

CPUS = [str(cpu) for cpu in sorted(os.sched_getaffinity(0))[:2]]
SCRIPT = """
import os, torch

def allowed():  # by the kernel: Python is told of the CPUs without a binding
    with open("/proc/self/status") as file:
        return next(line.split()[1] for line in file if line.startswith("Cpus_allowed_list"))

if os.environ.get("STEPS"):
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1).step()
is_near = allowed() == os.environ["CPUS"].split()[int(os.environ["LOCAL_RANK"])]
print("rate", 20.5 if is_near else 10.25, len(os.sched_getaffinity(0)))
"""


@pytest.mark.skipif(not may_mount(), reason="needs root, mounts of its own (unshare -m) and two CPUs")
def test_ranks_are_kept_on_their_nodes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "job.py").write_text(SCRIPT)
    words = ["--nproc-per-node", "2", "job.py"]
    environment = {"OMP_NUM_THREADS": "1", "CPUS": " ".join(CPUS)}
    with popen_behind(on_numa_nodes(tmp_path / "nodes", *CPUS)) as popen:
        tuned = start(AUTODDP, folder, ["--objective", "regex:max:rate ([0-9.]+)", *words], environment, popen).wait()
        assert tuned.returncode == 0, tuned.stderr[-3000:]
        again = start(AUTODDP, folder, words, environment, popen).wait()
    cpus = len(os.sched_getaffinity(0))
    (place,) = folder.glob("*.toml")
    assert load(place).configuration == {"numa_binding": "node"}
    assert "×2.00 better" in tuned.stderr
    assert again.stdout == f"rate 20.5 {cpus}\n" * 4, again.stderr[-2000:]  # of both jobs
    assert "left out" not in again.stderr
    elsewhere = start(AUTODDP, folder, words, environment).wait()  # the recipe on a host with one node
    jobs = f"rate 20.5 {cpus}\n" * 4 + f"rate 10.25 {cpus}\n" * 2  # one file has the output of all three
    assert elsewhere.stdout == jobs, elsewhere.stderr[-2000:]
    line = "warning: the recipe's numa_binding is left out: its CPUs are on one NUMA node"
    assert elsewhere.stderr.count(line) == 1, elsewhere.stderr[-2000:]
