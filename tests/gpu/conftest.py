"""Fixtures of the checks that need a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from outcomes import (  # noqa: F401  (pytest finds hooks and fixtures here)
    figure,
    pytest_collection_finish,
    pytest_collectreport,
    pytest_runtest_logreport,
)
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.worker.ddp.patch import Patch


@pytest.fixture
def needs_gpus() -> Callable[[int], None]:
    """`needs_gpus(2)` skips where there are fewer, and says so."""

    def needs(count: int) -> None:
        here = torch.cuda.device_count()
        if here < count:
            pytest.skip(f"needs {'a CUDA device' if count == 1 else f'{count} CUDA devices'}, and here are {here}")

    return needs


@pytest.fixture
def gpu(needs_gpus: Callable[[int], None]) -> torch.device:
    """The first one."""
    needs_gpus(1)
    return torch.device("cuda", 0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, needs_gpus: Callable[[int], None]) -> torch.device:
    """The CPU, and the first GPU: for a body that is the same on both."""
    if request.param == "cpu":
        return torch.device("cpu")
    needs_gpus(1)
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


@pytest.fixture
def alone(device: torch.device) -> Iterator[dist.ProcessGroup]:
    """A world of one under NCCL, or under gloo on the CPU."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    gc.collect()  # what DDP objects are left, while their group is there
    dist.destroy_process_group()


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Patch:
    """Not installed yet; the class is as before after the check, for those that run in the same process."""
    registering = ("register_comm_hook", "_register_builtin_comm_hook", "_set_static_graph")
    for name in ("__init__", *registering, "_pre_forward", "_post_forward"):
        monkeypatch.setattr(DDP, name, getattr(DDP, name))
    return Patch()


@pytest.fixture
def nccl(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    """A world of one under NCCL."""
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()
