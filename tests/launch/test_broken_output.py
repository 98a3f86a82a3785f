"""Whatever becomes of its output, a study ends and the job is launched."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from launchers import AUTODDP, SCRIPTS, start, whole

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
WORDS = ["--nproc-per-node", "2", "--trials", "2", "--allow", "exact", "train.py"]
REDIRECTED = {
    "a reader that goes": "{} 2>&1 | head -2",
    "a full disk": "{} >/dev/full 2>/dev/full",
    "closed": "{} >&- 2>&- <&-",
    "a log's reader that is dead": "{} 2> >(sleep 1) > >(sleep 1)",
}


@pytest.mark.parametrize(
    "kind", ["a reader that goes", "a full disk", whole("closed"), whole("a log's reader that is dead")]
)
def test_the_job_runs(kind: str, tmp_path: Path) -> None:
    line = REDIRECTED[kind].format(shlex.join([*AUTODDP, *WORDS]))
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    launch = start(("bash", "-c", line), folder, [], {"TUNED_TIMES_LONGER": "12"}).wait()
    assert (folder / "rank0.pt").exists(), launch.stderr[-2000:]
    assert (folder / "run.train.autoddp.toml").exists()
    assert (list(folder.glob(".autoddp/*/summary.json"))) != []
    assert launch.processes() == []
