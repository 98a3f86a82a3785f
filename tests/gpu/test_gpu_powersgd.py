"""PowerSGD's arithmetic on a device: orthonormal factors, and products that no autocast makes narrower."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import Configuration
from autoddp.worker.hooks import hook_for
from autoddp.worker.hooks.by_itself import one_matrix

SIDE = 256
RANK = 8  # enough for Cholesky QR on a GPU


def powersgd(group):
    return hook_for(Configuration({"hook": "powersgd", "powersgd_rank": RANK}), group, 0)


def relative(found, exact):
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("directions", [4, SIDE])
def test_factors_are_orthonormal_and_a_gradient_of_few_directions_is_exact(alone, device, figure, directions):
    state, hook = powersgd(alone)
    bucket = one_matrix(SIDE, device)
    random = torch.Generator().manual_seed(1)
    thin, wide = (torch.randn(SIDE, directions, generator=random) for _ in range(2))
    gradient = (thin @ wide.T).to(device).view(-1)
    for _ in range(4):
        bucket.buffer().copy_(gradient)
        made = hook(state, bucket).wait()
    error = relative(made, gradient)
    (factors,) = state.memory.factors[0]
    rows = factors[0].double()
    from_one = float((rows @ rows.T - torch.eye(RANK, device=device)).abs().max())
    figure("relative error", f"{error:.2g}")
    figure("products' distance from orthonormal", f"{from_one:.2g}")
    assert from_one < 1e-4
    assert error < 1e-4 if directions < RANK else 0.1 < error < 1.5


def test_autocast_around_the_backward_pass_does_not_reach_the_hook(alone, device, figure):
    """autograd hands autocast on to the thread in which DDP calls the hook."""
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(SIDE, SIDE, bias=False).to(device))
    state, hook = powersgd(alone)
    given, autocast = [], []

    def watched(state, bucket):
        given.append(bucket.buffer().clone())
        autocast.append(torch.is_autocast_enabled(device.type))
        return hook(state, bucket)

    ddp.register_comm_hook(state, watched)
    loss = ddp(torch.randn(32, SIDE, device=device)).square().sum()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss.backward()
    assert autocast == [True]
    bucket = one_matrix(SIDE, device)
    bucket.buffer().copy_(given[0])
    state, hook = powersgd(alone)
    without = hook(state, bucket).wait().view(SIDE, SIDE)
    difference = relative(ddp.module.weight.grad, without)
    figure("difference", f"{difference:.2g}")
    assert difference < 2e-5  # 16 bits would make a thousandth of it
