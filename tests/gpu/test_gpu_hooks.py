"""Hooks under NCCL: their rounding, gradients that float16 cannot hold, a GradScaler, and what they cost."""

import pytest
import torch
from on_gpu import layers, measured
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import Configuration
from autoddp.worker.hooks import hook_for
from autoddp.worker.hooks.by_itself import one_matrix
from autoddp.worker.hooks.sixteen_bit import clamped_to_float16
from autoddp.worker.process.device import _own_stream

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("configuration", "tolerance"),
    [
        ({"hook": "fp16"}, 1e-3),
        ({"hook": "bf16"}, 1e-2),
        ({"hook": "powersgd", "powersgd_rank": 8, "powersgd_start_step": 0}, None),
    ],
    ids=lambda value: value["hook"] if isinstance(value, dict) else "",
)
def test_hooks_under_nccl(nccl, gpu, figure, configuration, tolerance):
    """In a world of one the mean is the gradient itself: 16 bits round it, PowerSGD keeps a projection of it."""
    model, inputs = layers(256, 3).to(gpu), torch.randn(32, 256, device=gpu)
    model(inputs).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    ddp = DDP(model, device_ids=[0], bucket_cap_mb=0.1)
    state, hook = hook_for(Configuration(configuration), nccl)
    ddp.register_comm_hook(state, hook)
    for _ in range(3):  # DDP rebuilds its buckets after the first
        ddp.zero_grad()
        ddp(inputs).square().mean().backward()
    pairs = zip((p.grad for p in model.parameters()), expected, strict=True)
    errors = [float((found - exact).norm() / exact.norm()) for found, exact in pairs]
    figure("largest relative error", f"{max(errors):.2g}")
    assert max(errors) <= (tolerance or 1.5)


def test_what_float16_cannot_hold(nccl, gpu):
    """Finite stays finite, infinite stays infinite, on the device's own arithmetic."""
    state, hook = hook_for(Configuration({"hook": "fp16"}), nccl)
    bucket = one_matrix(4, gpu)
    bucket.buffer().fill_(1.0)
    hook(state, bucket).wait()  # as large as these are, so that what comes next is larger by far
    given = torch.tensor([1e6, -1e6, 3.4e38, 65504.0, 1.0, 0.0, float("inf"), -float("inf"), float("nan")])
    bucket.buffer()[:9] = given.to(gpu)
    made = hook(state, bucket).wait()[:9].cpu()
    assert made[:6].isfinite().all()
    assert made[:2].tolist() == [2 * 65504.0, -2 * 65504.0]
    assert made[6:8].tolist() == [float("inf"), -float("inf")]
    assert made[8].isnan()
    of_two = clamped_to_float16(torch.full((8,), 49_984.0, device=gpu), 2)
    assert (of_two + of_two).isfinite().all()


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_a_grad_scaler_finds_its_scale(nccl, gpu, figure, name):
    ddp = DDP(layers(256, 3).to(gpu), device_ids=[0])
    ddp.register_comm_hook(*hook_for(Configuration({"hook": name}), nccl))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, growth_interval=1000)
    inputs = torch.randn(32, 256, device=gpu)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.mse_loss(ddp(inputs).float(), inputs)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    figure("scale", f"2^{torch.tensor(scaler.get_scale()).log2():.0f}")
    assert scaler.get_scale() < 2.0**40
    assert losses[-1] < losses[0]
    assert all(p.isfinite().all() for p in ddp.parameters())


@pytest.mark.parametrize("name", ["fp16", "bf16", "powersgd"])
def test_what_a_hook_costs(nccl, gpu, figure, name):
    values = {"hook": name} | ({"powersgd_rank": 4} if name == "powersgd" else {})
    state, hook = hook_for(Configuration(values), nccl, 0)
    bucket = one_matrix(2048, gpu)
    for _ in range(5):
        hook(state, bucket).wait()
    figure("ms for 16 MiB", f"{1e3 * measured(lambda: hook(state, bucket).wait()):.3f}")


@pytest.fixture
def blocking_wait(monkeypatch):
    """Before a group is made, which reads it then."""
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")


@pytest.mark.parametrize("name", ["fp16", "bf16", "powersgd"])
def test_the_host_goes_on_where_a_scripts_own_waits_hold_it_up(blocking_wait, nccl, gpu, figure, name):
    """It comes back while the device has work for half a second, and NCCL's work keeps no memory afterwards."""
    values = {"hook": name} | ({"powersgd_rank": 4} if name == "powersgd" else {})
    state, hook = hook_for(Configuration(values), nccl, 0)
    bucket = one_matrix(2048, gpu)
    for _ in range(3):
        hook(state, bucket).wait()
    torch.cuda.synchronize(gpu)
    held, busy = torch.cuda.memory_allocated(gpu), torch.cuda.Event()
    torch.cuda._sleep(10**9)  # cycles
    busy.record()
    done = hook(state, bucket)
    assert not busy.query()
    assert done.wait().isfinite().all()
    torch.cuda.synchronize(gpu)
    del done
    figure("MiB more", f"{(torch.cuda.memory_allocated(gpu) - held) / 2**20:.2f}")
    assert torch.cuda.memory_allocated(gpu) <= held + 2**20


def test_the_backward_pass_does_not_wait_for_powersgd(nccl, gpu):
    """While the stream of PowerSGD's waits has work for half a second, the backward pass's stream goes on."""
    state, hook = hook_for(Configuration({"hook": "powersgd", "powersgd_rank": 4}), nccl, 0)
    bucket = one_matrix(2048, gpu)
    for _ in range(3):  # libraries have their handles and memory by then
        hook(state, bucket).wait()
    torch.cuda.synchronize(gpu)
    backward, busy, gone_on = torch.cuda.current_stream(gpu), torch.cuda.Event(), torch.cuda.Event()
    with torch.cuda.stream(_own_stream(gpu)):
        torch.cuda._sleep(10**9)  # cycles
        busy.record()
    done = hook(state, bucket)
    assert torch.cuda.current_stream(gpu) == backward
    gone_on.record()
    gone_on.synchronize()
    assert not busy.query()
    made = done.wait().clone()
    torch.cuda.synchronize(gpu)
    assert busy.query()
    assert made.isfinite().all()
