"""Platforms that no test can start: two launchers on two hosts of a lab, each with exactly a platform's variables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from lab import Lab
from launchers import AUTODDP, SCRIPTS, Launch, start, unwrapped
from recorded import read

PLAIN = str(SCRIPTS / "plain.py")
QUICK = {"OMP_NUM_THREADS": "1", "TUNED_TIMES_LONGER": "12", "GLOO_SOCKET_IFNAME": "eth0"}
NODE: dict[str, Callable[[int], dict[str, str]]] = {
    "skypilot": lambda node: {"SKYPILOT_NODE_RANK": str(node), "SKYPILOT_NUM_GPUS_PER_NODE": "1"},
    "pytorchjob": lambda node: {"PET_NODE_RANK": str(node), "RANK": str(node), "PET_NPROC_PER_NODE": "1"},
    "trainjob": lambda node: {"PET_NODE_RANK": str(node), "JOB_COMPLETION_INDEX": str(node), "PET_NPROC_PER_NODE": "1"},
    "pai-dlc": lambda node: {"RANK": str(node), "NPROC_PER_NODE": "1"},
    "sagemaker": lambda node: {"SM_CURRENT_HOST": f"algo-{node + 1}", "SM_NUM_GPUS": "1"},
    "azure-ml": lambda node: {"NODE_RANK": str(node), "AZ_BATCH_MASTER_NODE": "10.77.0.1:6000"},
    "model-arts": lambda node: {"VC_TASK_INDEX": str(node), "MA_NUM_GPUS": "1"},
    "volcano": lambda node: {"VC_TASK_INDEX": str(node)},
    "torchx": lambda node: {},
    "jobset": lambda node: {"JOB_COMPLETION_INDEX": str(node)},
    "hyperpod-eks": lambda node: {"NPROC_PER_NODE": "1"},
    "open-mpi-launchers": lambda node: {"OMPI_COMM_WORLD_RANK": str(node)},
    "mpich-launchers": lambda node: {"PMI_RANK": str(node)},
    "ray-train": lambda node: {**RANKS, "RANK": str(node), "NODE_RANK": str(node)},
    "composer": lambda node: {**RANKS, "RANK": str(node), "NODE_RANK": str(node)},
    "pytorchjob-without-pet": lambda node: {"RANK": str(node)},
    "volcano-two-tasks": lambda node: {"VC_TASK_INDEX": "0"},
    "vertex-ai": lambda node: {"RANK": str(node)},
    "flux": lambda node: {"PMI_RANK": str(node), "FLUX_TASK_RANK": str(node)},
}
"""Situation → what differs from the recorded variables: the node, one rank on it, and where it is an address."""
RANKS = {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
MISSING: dict[str, tuple[str, ...]] = {
    "torchx": ("--nnodes", "--node-rank"),
    "jobset": ("--nnodes", "--master-addr"),
    "hyperpod-eks": ("--node-rank", "--master-addr"),
    "open-mpi-launchers": ("--master-addr",),
    "mpich-launchers": ("--master-addr",),
    **dict.fromkeys(
        ("ray-train", "composer", "pytorchjob-without-pet", "volcano-two-tasks", "vertex-ai", "flux"),
        ("--nnodes", "--node-rank", "--master-addr"),
    ),
}
"""Situation in which a platform does not tell the whole place → the flags that its line asks for."""
WITHOUT_RANKS = {*MISSING, "azure-ml", "volcano"} - {"hyperpod-eks"}
"""Situations in which nobody tells how many ranks a node starts."""
MASTERS = "digits-master-0 digits-node-0-0.digits dlc18isgeaydxxxx-master-0 algo-1 job-worker-0.job n01"
NAMES = f"127.0.0.1 localhost\n10.77.0.1 host0 {MASTERS}\n10.77.0.2 host1 algo-2 job-worker-1.job\n"


def launcher(hosts: Lab, parent: Path, name: str, node: int, words: Sequence[str]) -> Launch:
    """The launcher on one host, with the variables of a situation."""
    variables = {**QUICK, **read(name), **NODE[name](node)}
    return start(AUTODDP, parent / f"host{node}", words, variables, popen=functools.partial(hosts.fork, node))


def flags(name: str, node: int) -> list[str]:
    """Those that a user adds: what the line asks for, and one rank where nobody tells how many."""
    values = {"--nnodes": "2", "--node-rank": str(node), "--master-addr": "host0", "--nproc-per-node": "1"}
    missing = [*MISSING.get(name, ()), *(["--nproc-per-node"] if name in WITHOUT_RANKS else [])]
    return [word for flag in missing for word in (flag, values[flag])]


@pytest.mark.lab
@pytest.mark.whole  # `make clusters`; `make test` has the pods of test_pods.py
@pytest.mark.parametrize("name", NODE)
def test_a_tuned_job_ends_right(lab: Callable[..., Lab], tmp_path: Path, name: str) -> None:
    """Where nodes, rank and master are told; elsewhere with the flags that the line asks for."""
    words = ["--trials", "1", "--diagnose-budget", "0", PLAIN]
    hosts = lab(hosts=2, names=[NAMES] * 2)
    started = [launcher(hosts, tmp_path, name, node, [*flags(name, node), *words]) for node in range(2)]
    ended = [launch.wait() for launch in started]
    assert [launch.returncode for launch in ended] == [0, 0], ended[0].stderr[-3000:] + ended[1].stderr[-3000:]
    for node, launch in enumerate(ended):
        if len(MISSING.get(name, ())) < 3:
            assert f"this is node {node} (" in unwrapped(launch.stderr)
        assert f"rank {node} trained 120 steps" in launch.stdout
        assert (launch.folder / "scripts.plain.autoddp.toml").exists()


@pytest.mark.lab
def test_a_master_whose_name_nobody_knows_ends_the_start(lab: Callable[..., Lab], tmp_path: Path) -> None:
    hosts = lab(hosts=2)
    started = [
        launcher(hosts, tmp_path, "sagemaker", node, ["--trials", "1", "--diagnose-budget", "0", PLAIN])
        for node in range(2)
    ]
    for node, launch in enumerate([one.wait() for one in started]):
        assert launch.returncode == 2
        error = f"autoddp: error: SM_HOSTS names the master algo-1, and this node (host{node}) knows no address"
        assert error in launch.stderr.splitlines()[-1]
        assert "give its address by --master-addr" in launch.stderr


@pytest.mark.lab
def test_a_master_where_nobody_answers_is_named_with_its_variable(lab: Callable[..., Lab], tmp_path: Path) -> None:
    """Node 1 alone has come. It waits for node 0 as long as torchrun would, here a second."""
    words = ["--rdzv-conf", "timeout=1", "--trials", "1", PLAIN]
    launch = launcher(lab(hosts=2), tmp_path, "skypilot", 1, words).wait()
    assert launch.returncode == 2
    assert "--master-addr (from SKYPILOT_NODE_IPS) 10.77.0.1:29500 from this host (host1): " in launch.stderr
    assert "Traceback" not in launch.stderr
