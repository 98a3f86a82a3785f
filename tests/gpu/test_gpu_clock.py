"""The event clock, on the model's device."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from autoddp.worker.observe.stopwatch import Stopwatch
from autoddp.worker.process.device import finish_queued_work

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


def timed(device):
    """Seconds by the device's events and by the wall clock, of five steps whose work Python only queues."""
    matrix = torch.randn(4096, 4096, device=device)
    matrix @ matrix
    watch = Stopwatch(device)
    began = time.perf_counter()
    watch.start()
    for _ in range(5):
        for _ in range(20):
            matrix @ matrix
        watch.lap()
    steps = watch.stop()
    assert len(steps) == 5
    return sum(steps), time.perf_counter() - began


def test_the_event_clock_sees_the_devices_time_not_pythons(gpu, figure):
    events, wall = timed(gpu)
    figure("events / wall clock", f"{events / wall:.2f}")
    assert events == pytest.approx(wall, rel=0.3)


ELSEWHERE = """
import torch
import test_gpu_clock

events, wall = test_gpu_clock.timed(torch.device("cuda", 1))
test_gpu_clock.finish_queued_work(10)
print(events / wall, torch.cuda.memory_reserved(0))
"""


def test_a_model_on_another_device_than_the_current_one(needs_gpus, figure):
    """Nothing is allocated on the current device, which stands idle."""
    needs_gpus(2)
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    ratio, reserved = map(float, done.stdout.split())
    figure("events / wall clock", f"{ratio:.2f}")
    assert ratio == pytest.approx(1, rel=0.3)
    assert reserved == 0


def test_what_is_queued_is_finished_before_a_rank_leaves(gpu, figure):
    matrix = torch.randn(8192, 8192, device=gpu)
    done = torch.cuda.Event()
    for _ in range(50):
        matrix @ matrix
    done.record()
    assert not done.query()
    began = time.perf_counter()
    finish_queued_work(60)
    figure("seconds", f"{time.perf_counter() - began:.2f}")
    assert done.query()
