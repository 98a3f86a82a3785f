"""A launch-bound model with CUDA graphs: the same losses, in less time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400), pytest.mark.alone]


@pytest.fixture(scope="module")
def with_graphs():
    """What each training found."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and here are 0")
    script = str(Path(__file__).parent / "graphs_on_one_gpu.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_graphs_train_as_without_and_faster(with_graphs, figure):
    """Losses under dropout, BatchNorm and AdamW: the random numbers and statistics go on as without a capture."""
    for name, run in with_graphs.items():
        figure(name, f"{run['step'] * 1e3:.2f} ms {run['memory'] / 2**20:.0f} MiB")
    for autocast in ("", " autocast"):
        eager = with_graphs[f"eager{autocast}"]
        for mode in ("model", "blocks"):
            graphed = with_graphs[f"{mode}{autocast}"]
            assert graphed["why_not"] == {"model": "", "blocks": ""}
            assert graphed["replayed"] > 0
            assert graphed["losses"] == pytest.approx(eager["losses"], rel=2e-2 if autocast else 1e-3)
        compiled, replayed = with_graphs[f"compiled{autocast}"], with_graphs[f"compiled replayed{autocast}"]
        assert replayed["why_not"] == {"reduce-overhead": ""}
        assert replayed["losses"] == pytest.approx(compiled["losses"], rel=2e-2 if autocast else 1e-3)
    assert with_graphs["eager"]["step"] > 1.3 * with_graphs["model"]["step"]
