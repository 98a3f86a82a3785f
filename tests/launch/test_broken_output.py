"""Whatever becomes of its output, a study ends and the job is launched."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from launchers import BRIEF, SCRIPTS, Launch, forked, start, whole

# A script that prints fails by itself on a full disk, as under torchrun.
SCRIPT = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
from common import batches, finish, loss, network, optimizer, start, stop
from torch.nn.parallel import DistributedDataParallel as DDP
rank = start()
model = DDP(network())
sgd = optimizer(model)
for inputs, targets in batches(120, rank):
    sgd.zero_grad()
    loss(model(inputs), targets).backward()
    sgd.step()
finish(model)
del model, sgd
stop()
"""
WORDS = ["--nproc-per-node", "2", "--trials", "1", "--allow", "exact", "--diagnose-budget", "0", "train.py"]
LONG = {"TUNED_TIMES_LONGER": "12"}
REDIRECTED = {
    "closed": "{} >&- 2>&- <&-",
    "a log's reader that is dead": "{} 2> >(sleep 1) > >(sleep 1)",
}


def place(parent: Path) -> Path:
    folder = parent / "run"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    return folder


def require_tuned_and_launched(launch: Launch) -> None:
    folder = launch.folder
    assert (folder / "rank0.pt").exists(), launch.stderr[-2000:]
    assert (folder / "run.train.autoddp.toml").exists()
    assert (list(folder.glob(".autoddp/2*/summary.json"))) != []
    assert launch.processes() == []


@pytest.mark.parametrize(
    ("stdout", "stderr"),
    [
        ("a full disk", "a reader that goes"),
        whole("a reader that goes", "a full disk"),
        whole("a full disk", "a full disk"),
    ],
)
def test_the_job_runs(stdout: str, stderr: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:

        def opened(kind: str) -> Any:
            if kind == "a full disk":
                return stack.enter_context(open("/dev/full", "w"))
            return stack.enter_context(subprocess.Popen(["head", "-2"], stdin=subprocess.PIPE)).stdin

        def popen(argv: Sequence[str], **options: Any) -> Any:
            return forked(argv, **{**options, "stdout": opened(stdout), "stderr": opened(stderr)})

        launch = start(BRIEF, place(tmp_path), WORDS, LONG, popen).wait()
    require_tuned_and_launched(launch)


@pytest.mark.whole  # each start from nothing
@pytest.mark.parametrize("kind", REDIRECTED)
def test_the_job_of_a_shell_runs(kind: str, tmp_path: Path) -> None:
    line = REDIRECTED[kind].format(shlex.join([*BRIEF, *WORDS]))
    require_tuned_and_launched(start(("bash", "-c", line), place(tmp_path), [], LONG).wait())
