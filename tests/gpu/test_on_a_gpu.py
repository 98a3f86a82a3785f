"""What only a CUDA device can show: event clock, hooks under NCCL, CUDA graphs, a study of ranks that share a GPU."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launchers import AUTODDP, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import Configuration
from autoddp.worker.hooks import hook_for
from autoddp.worker.stopwatch import CudaStopwatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; tests/gpu/run.sh runs all of these"),
]
JOB = str(Path(__file__).parent / "train_on_one_gpu.py")


def test_the_event_clock_sees_the_devices_time_not_pythons():
    matrix = torch.randn(4096, 4096, device="cuda")
    matrix @ matrix
    watch = CudaStopwatch()
    began = time.perf_counter()
    watch.start()
    for _ in range(5):
        for _ in range(20):
            matrix @ matrix
        watch.lap()
    steps = watch.stop()
    assert len(steps) == 5
    assert sum(steps) == pytest.approx(time.perf_counter() - began, rel=0.3)


@pytest.fixture
def nccl(monkeypatch):
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setitem(os.environ, name, value)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("configuration", "tolerance"),
    [
        ({"hook": "fp16"}, 1e-3),
        ({"hook": "bf16"}, 1e-2),
        ({"hook": "powersgd", "powersgd_rank": 8, "powersgd_start_step": 0}, None),
    ],
)
def test_hooks_under_nccl(nccl, configuration, tolerance):
    """In a world of one the mean is the gradient itself: 16 bits round it, PowerSGD keeps a projection of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).cuda()
    inputs = torch.randn(32, 256, device="cuda")
    model(inputs).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    ddp = DDP(model, device_ids=[0], bucket_cap_mb=0.1)
    state, hook = hook_for(Configuration(configuration), nccl)
    ddp.register_comm_hook(state, hook)
    ddp(inputs).square().mean().backward()
    for found, exact in zip((p.grad for p in model.parameters()), expected, strict=True):
        error = float((found - exact).norm() / exact.norm())
        assert error <= tolerance if tolerance else error < 1
    del ddp


@pytest.fixture(scope="module")
def with_graphs():
    script = str(Path(__file__).parent / "graphs_on_one_gpu.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name, run in found.items():
        print(f"{name:26} {run['step'] * 1e3:7.3f} ms a step, {run['memory'] / 2**20:.0f} MiB for graphs")
    return found


@pytest.mark.parametrize("autocast", ["", " autocast"])
@pytest.mark.parametrize("mode", ["model", "blocks"])
def test_cuda_graphs_train_as_without(with_graphs, mode, autocast):
    """Losses under dropout, BatchNorm and AdamW: the random numbers and statistics go on as without a capture."""
    eager, graphed = with_graphs[f"eager{autocast}"], with_graphs[f"{mode}{autocast}"]
    assert graphed["why_not"] == {"model": "", "blocks": ""}
    assert graphed["replayed"] > 0
    assert graphed["losses"] == pytest.approx(eager["losses"], rel=2e-2 if autocast else 1e-3)


@pytest.mark.parametrize("autocast", ["", " autocast"])
def test_a_compiled_model_trains_as_without_its_graphs(with_graphs, autocast):
    compiled, replayed = with_graphs[f"compiled{autocast}"], with_graphs[f"compiled replayed{autocast}"]
    assert replayed["why_not"] == {"reduce-overhead": ""}
    assert replayed["losses"] == pytest.approx(compiled["losses"], rel=2e-2 if autocast else 1e-3)


def test_a_compiled_models_graphs_make_it_faster(with_graphs):
    assert with_graphs["compiled"]["step"] > with_graphs["compiled replayed"]["step"]


def test_cuda_graphs_make_a_launch_bound_model_faster(with_graphs):
    assert with_graphs["eager"]["step"] > 1.3 * with_graphs["model"]["step"]


def test_gloo_ranks_that_share_a_gpu_are_tuned_and_launched(tmp_path):
    launch = start(AUTODDP, tmp_path / "run", ["--nproc-per-node", "2", "--trials", "8", JOB]).wait()
    assert launch.returncode == 0, launch.stderr[-3000:]
    study = json.loads(next(launch.folder.glob(".autoddp/*/summary.json")).read_text())
    assert len(study["trials"]) == 8
    assert study["job"]["devices"] == [torch.cuda.get_device_name(0)]
    assert any(trial["state"] == "measured" for trial in study["trials"])
    assert launch.stdout.count("trained") == 2
