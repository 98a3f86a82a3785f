"""Pods of Kubernetes, played on two hosts of a lab: a pod's variables, late names, a pod that starts again.

No Kubernetes is here. What its network and its operators do to a launcher is done to it: names come after the start,
and the operator starts a pod again that has failed, in the same place.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from lab import Lab
from launchers import SCRIPTS, Launch, wait_for, whole
from test_other_platforms import NAMES, launcher

PLAIN = str(SCRIPTS / "plain.py")
RECIPE = "scripts.plain.autoddp.toml"
MASTERS = {"trainjob": "digits-node-0-0.digits", "pytorchjob": "digits-master-0"}
NOBODY = "127.0.0.1 localhost\n"
TUNES = ("--trials", "1", "--diagnose-budget", "0")
ENDLESS_TRIALS = ("--trials", "500", "--all-trials")


def pods(hosts: Lab, folder: Path, job: str, words: Sequence[str]) -> list[Launch]:
    return [launcher(hosts, folder, job, node, words) for node in range(2)]


def require_trained(ended: Sequence[Launch]) -> None:
    for node, launch in enumerate(ended):
        assert launch.wait().returncode == 0, launch.stderr[-3000:]
        assert f"rank {node} trained 120 steps" in launch.stdout


@pytest.mark.lab
@pytest.mark.parametrize("job", ["trainjob", whole("pytorchjob")])
def test_names_that_resolve_late_are_waited_for(lab: Callable[..., Lab], tmp_path: Path, job: str) -> None:
    hosts = lab(hosts=2, names=[NOBODY] * 2)
    started = pods(hosts, tmp_path, job, [*TUNES, PLAIN])
    unknown = f"the name {MASTERS[job]} does not resolve"
    wait_for(lambda: all(unknown in pod.stderr for pod in started), "both pods to say what they wait for")
    for node in range(2):
        hosts.names(node, NAMES)
    require_trained(started)
    assert "waiting at --master-addr (from PET_MASTER_ADDR)" in started[1].stderr
    assert all((pod.folder / RECIPE).exists() for pod in started)
    # torchrun itself shows one at the end of the job, where the other host's launcher has ended first.
    assert all("Traceback" not in pod.stderr.partition("starting the job")[0] for pod in started)


@pytest.mark.lab
@pytest.mark.whole
@pytest.mark.parametrize("job", MASTERS)
@pytest.mark.parametrize("when", ["trials", "real job"])
def test_node_0_that_starts_again_in_the_middle(
    lab: Callable[..., Lab], tmp_path: Path, job: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pod is killed with all that runs there. The operator starts it again, and the other one, which has failed."""
    hosts = lab(hosts=2, names=[NAMES] * 2)
    with monkeypatch.context() as longer:
        longer.setenv("TIMES_LONGER", "100000")
        first = pods(hosts, tmp_path, job, [*(TUNES if when == "real job" else ENDLESS_TRIALS), PLAIN])
        begun = "launching" if when == "real job" else "autoddp: trial "
        wait_for(lambda: begun in first[0].stderr and len(first[0].training(PLAIN)) == 1, f"the {when}")
    for pid in hosts.processes(0):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    again = launcher(hosts, tmp_path, job, 0, [*TUNES, PLAIN])
    assert first[1].wait().returncode != 0, first[1].stderr[-3000:]
    require_trained([again, launcher(hosts, tmp_path, job, 1, [*TUNES, PLAIN])])
