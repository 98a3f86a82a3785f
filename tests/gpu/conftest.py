"""Fixtures of the checks that need a GPU, and what `run_checks.py` learns from each."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.worker.ddp.objects import Patch

HERE = Path(__file__).parent


def pytest_collection_finish(session: pytest.Session) -> None:
    """For `run_checks.py`: the checks, and the limits that some have."""
    place = os.environ.get("GPU_LIMITS")
    if place:
        own = [item for item in session.items if item.path.parent == HERE]
        marks = {item.nodeid: item.get_closest_marker("timeout") for item in own}
        Path(place).write_text(json.dumps({name: mark.args[0] if mark else 0 for name, mark in marks.items()}))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """For `run_checks.py`: how it went, and the figure that the check has recorded."""
    place = os.environ.get("GPU_RESULT")
    if not place or (report.when != "call" and report.passed):
        return
    if report.skipped:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        found = {"outcome": "skipped", "figure": why.removeprefix("Skipped: ")}
    else:
        crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
        figures = ", ".join(f"{name} {value}" for name, value in report.user_properties)
        found = {"outcome": report.outcome, "figure": (figures or crash).replace("\n", " ")[:200]}
    Path(place).write_text(json.dumps(found))


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


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str, object], None]:
    """`figure("ms a step", "3.1")`: what the table shows beside the check."""
    return record_property
