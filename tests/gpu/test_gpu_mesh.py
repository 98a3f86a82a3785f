"""A `device_mesh` that DDP was given: one of its own, and one cut out of a mesh that also splits parameters."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import Configuration

CONFIGURATION = Configuration({"gradient_as_bucket_view": True, "hook": "bf16"})


@pytest.mark.parametrize("is_sliced", [False, True], ids=["whole", "sliced"])
def test_a_mesh_that_also_splits_parameters_is_left_alone(alone, device, patch, is_sliced):
    """A job under a recipe, which trains on as written where the mesh is a part of a larger one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU()).to(device)
    if is_sliced:
        mesh = init_device_mesh(device.type, (1, 1), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
        assert all(isinstance(p, DTensor) for p in model.parameters())
        mesh = mesh["data"]
    else:
        mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("data",))
    patch.configuration = CONFIGURATION
    patch.install()
    ddp = DDP(model, device_mesh=mesh)
    (wrapped,) = patch.alive()
    assert ("its device_mesh is part of a larger one" in wrapped.why_untouchable()) is is_sliced
    assert ddp.gradient_as_bucket_view is not is_sliced
    assert bool(ddp._comm_hooks) is not is_sliced
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (ddp(torch.ones(4, 16, device=device)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
