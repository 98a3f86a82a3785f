"""The order on streams, under torch's own sanitizer: what tests/worker/test_stream_order.py does on streams of its own.

The sanitizer sees the kernels of torch and what orders them: a hook's arithmetic, the stream of PowerSGD, batches. What
NCCL reads and writes it cannot see, see ordered_streams.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ordered_streams import HOOKS

SCRIPT = Path(__file__).with_name("ordered_streams.py")
RACE = "detected a possible data race"


def run(device, *words):
    """The process, which has ended; under the sanitizer where there are streams."""
    sanitizer = {"TORCH_CUDA_SANITIZER": "1"} if device.type == "cuda" else {}
    environment = {**os.environ, **sanitizer}
    command = [sys.executable, str(SCRIPT), device.type, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.timeout(150)
def test_no_kernel_runs_before_what_it_needs(device):
    everything = ["exact", *HOOKS, "kept batches"]
    done = run(device, *everything)
    assert done.returncode == 0, done.stderr[-3000:]
    assert RACE not in done.stderr
    assert done.stdout.splitlines() == everything


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["powersgd", "kept batches"])
def test_a_missing_wait_is_told(gpu, what):
    done = run(gpu, "unwaited", what)
    assert RACE in done.stderr, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["unwaited"]
