"""An exception in one rank in the first steps ends tuning, every time, and the script runs and fails as written."""

import pytest
from launchers import AUTODDP, SCRIPTS, whole
from test_tuned_scripts import run

SCRIPT = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
from common import batches, loss, network, optimizer, start
from torch.nn.parallel import DistributedDataParallel as DDP

rank = start()
model = DDP(network())
sgd = optimizer(model)
for number, (inputs, targets) in enumerate(batches(100, rank)):
    if rank == 1 and number == int(sys.argv[1]):
        raise RuntimeError("planted in the first steps")
    sgd.zero_grad()
    loss(model(inputs), targets).backward()
    sgd.step()
"""


@pytest.mark.parametrize(
    "step", [whole(0), 5, whole(6)]
)  # before the ranks are ready, just then, and in the first block
def test_an_exception_in_one_rank_in_the_first_steps(step, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launch = run(AUTODDP, tmp_path / "run", f"{script} {step}", "--trials", "4")
    (line,) = [line for line in launch.stderr.splitlines() if "not tuned, launching as written" in line]
    assert "rank 1: RuntimeError: planted in the first steps" in line
    assert launch.returncode == 1  # the real job's
    assert "ChildFailedError" in launch.stderr
    assert len(list(launch.folder.glob(".autoddp/2*/attempt*"))) == 1
    assert launch.processes() == []
