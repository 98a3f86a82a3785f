"""Two NCCL ranks on one GPU, where NCCL lets them start: what hooks reduce between ranks, and a job that is tuned."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from launchers import AUTODDP, ROOT, environment, start

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
HERE = Path(__file__).parent
TOLERANCE = {"exact": 1e-6, "views": 1e-6, "fp16": 2e-3, "bf16": 1e-2, "powersgd": 1.5}


def test_hooks_between_two_ranks(gpu, figure):
    """Each hook gives the mean of gradients that differ, the same on both ranks."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(HERE / "nccl_pair.py")]
    done = subprocess.run([sys.executable, *words], env=environment(), capture_output=True, text=True, timeout=200)
    if "Duplicate GPU" in done.stderr:
        pytest.skip("needs an NCCL that lets two ranks share a GPU")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    for name, made in found.items():
        figure(name, f"{made['error']:.2g}")
    assert all(made["ranks agree"] for made in found.values())
    assert all(made["error"] <= TOLERANCE[name] for name, made in found.items())


def test_two_ranks_are_tuned_and_launched(gpu, tmp_path, figure):
    job = [str(HERE / "train_on_one_gpu.py"), "--backend", "nccl", "--share"]
    launch, states = tuned(tmp_path, ["--trials", "12", *job], figure)
    assert states["measured"] >= 4
    assert launch.stdout.count("trained") == 2


@pytest.mark.alone
def test_a_vision_transformer_with_graphs_and_hooks(gpu, tmp_path, figure):
    """306 million parameters, whose gradients take many times as long as the step computes."""
    pytest.importorskip("torchvision", reason="needs torchvision")
    vit = [str(ROOT / "recipes" / "vit" / "train.py"), "--model", "vit_l_32", "--bf16", "--steps", "60"]
    options = ["--trials", "16", "--budget", "130s", "--diagnose-budget", "0", "--cuda-graphs"]
    launch, states = tuned(tmp_path, [*options, str(HERE / "share_gpu.py"), *vit], figure)
    figure("job", next(line for line in launch.stdout.splitlines() if "ms per step" in line))
    assert states["measured"] >= 3


def tuned(tmp_path, words, figure):
    """The launch, which is over, and how many of its trials ended in which state."""
    launch = start(AUTODDP, tmp_path / "run", ["--standalone", "--nproc-per-node", "2", *words])
    try:
        launch.process.wait(230)
    finally:
        launch.kill()
    if "Duplicate GPU" in launch.stderr:
        pytest.skip("needs an NCCL that lets two ranks share a GPU")
    print(launch.stderr[-4000:])
    assert launch.returncode == 0
    study = json.loads(next(launch.folder.glob(".autoddp/2*/summary.json")).read_text())
    states = Counter(trial["state"] for trial in study["trials"])
    figure("trials", dict(states))
    figure("said", " | ".join(line for line in launch.stderr.splitlines() if "launching" in line)[:200])
    return launch, states
