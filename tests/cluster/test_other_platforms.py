"""Platforms that no test can start: two launchers on two hosts of a lab, each with exactly a platform's variables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from lab import Lab
from launchers import AUTODDP, SCRIPTS, Launch, start, whole
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
}
"""Situation → what differs from the recorded variables: the node, one rank on it, and where it is an address."""
MASTERS = "digits-master-0 digits-node-0-0.digits dlc18isgeaydxxxx-master-0 algo-1 job-worker-0.job"
NAMES = f"127.0.0.1 localhost\n10.77.0.1 host0 {MASTERS}\n10.77.0.2 host1 algo-2 job-worker-1.job\n"


def launches(
    hosts: Lab, parent: Path, name: str, words: Sequence[str], more: Mapping[str, str] | None = None
) -> list[Launch]:
    """One launcher on each host, with the variables of a situation."""
    started = [
        start(
            AUTODDP,
            parent / f"host{node}",
            words,
            {**QUICK, **read(name), **NODE[name](node), **(more or {})},
            popen=functools.partial(hosts.fork, node),
        )
        for node in range(2)
    ]
    return [launch.wait() for launch in started]


@pytest.mark.lab
@pytest.mark.parametrize("name", [name if name == "skypilot" else whole(name) for name in NODE])
def test_a_tuned_job_ends_right(lab: Callable[..., Lab], tmp_path: Path, name: str) -> None:
    words = ["--trials", "1", "--diagnose-budget", "0", PLAIN]
    ranks = ["--nproc-per-node", "1"] if name in ("azure-ml", "volcano") else []  # which tell no number of ranks
    ended = launches(lab(hosts=2, names=[NAMES] * 2), tmp_path, name, [*ranks, *words])
    assert [launch.returncode for launch in ended] == [0, 0], ended[0].stderr[-3000:] + ended[1].stderr[-3000:]
    for node, launch in enumerate(ended):
        assert f"this is node {node} (" in launch.stderr
        assert f"rank {node} trained 120 steps" in launch.stdout
        assert (launch.folder / "scripts.plain.autoddp.toml").exists()


@pytest.mark.lab
def test_a_master_whose_name_nobody_knows_ends_the_start(lab: Callable[..., Lab], tmp_path: Path) -> None:
    ended = launches(lab(hosts=2), tmp_path, "sagemaker", ["--trials", "1", PLAIN])
    for node, launch in enumerate(ended):
        assert launch.returncode == 2
        error = f"autoddp: error: SM_HOSTS names the master algo-1, and this node (host{node}) knows no address"
        assert error in launch.stderr.splitlines()[-1]
        assert "give its address by --master-addr" in launch.stderr


@pytest.mark.lab
def test_a_master_where_nobody_answers_is_named_with_its_variable(lab: Callable[..., Lab], tmp_path: Path) -> None:
    """Node 1 alone has come. It waits for node 0 as long as torchrun would, here a second."""
    variables = {**QUICK, **read("skypilot"), **NODE["skypilot"](1)}
    words = ["--rdzv-conf", "timeout=1", "--trials", "1", PLAIN]
    hosts = lab(hosts=2)
    launch = start(AUTODDP, tmp_path / "host1", words, variables, popen=functools.partial(hosts.fork, 1)).wait()
    assert launch.returncode == 2
    assert "--master-addr (from SKYPILOT_NODE_IPS) 10.77.0.1:29500 from this host (host1): " in launch.stderr
    assert "Traceback" not in launch.stderr
