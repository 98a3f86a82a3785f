"""What the comparison in a real job takes: memory at the peak of a step, and time."""

import pytest
import torch
from on_gpu import layers, measured
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import Configuration
from autoddp.worker.gradients.comparison import Comparison
from autoddp.worker.hooks import hook_for

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


@pytest.mark.parametrize(("name", "sampled"), [("bf16", 0), ("powersgd", 2**12)])
def test_a_look_takes_little_and_the_host_waits_for_none_of_it(nccl, gpu, figure, name, sampled):
    ddp = DDP(layers(2048, 12).to(gpu), device_ids=[0])
    values = {"hook": name} | ({"powersgd_rank": 4} if name == "powersgd" else {})
    comparison = Comparison(sampled=sampled)
    state, hook = hook_for(Configuration(values), nccl, 0)
    ddp.register_comm_hook(state, comparison.around(hook, nccl))
    inputs = torch.randn(2048, 2048, device=gpu)
    gradient_bytes = sum(p.numel() * p.element_size() for p in ddp.parameters())

    def step():
        ddp.zero_grad()
        ddp(inputs).square().mean().backward()

    found = {}
    for on in (False, True):
        comparison.on = on
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(gpu)
        before = torch.cuda.memory_allocated(gpu)
        step()
        torch.cuda.synchronize()
        held = (torch.cuda.memory_allocated(gpu) - before) / gradient_bytes
        found[on] = torch.cuda.max_memory_allocated(gpu) / gradient_bytes, held, measured(step)
    torch.cuda.set_sync_debug_mode("error")  # what makes the host wait for the device raises from here on
    try:
        step()
        comparison.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    error = comparison.result(str, nccl)
    figure("peak in gradients", f"{found[False][0]:.2f} → {found[True][0]:.2f}")
    figure("ms a step", f"{1e3 * found[False][2]:.2f} → {1e3 * found[True][2]:.2f}")
    figure("relative error", f"{error.relative:.2g}")
    assert found[True][0] - found[False][0] < 1.1  # each bucket once more while it travels
    assert found[True][1] < 0.1  # and next to nothing when the next forward pass begins
    assert 0 < error.relative < (0.01 if name == "bf16" else 1)
