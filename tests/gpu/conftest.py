"""Fixtures of the checks that need a GPU, and what `run_checks.py` learns from each."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.worker.ddp.objects import Patch

HERE = Path(__file__).parent


def pytest_collection_finish(session: pytest.Session) -> None:
    """For `run_checks.py`: the checks, the limits that some have, and which need the device alone."""
    place = os.environ.get("GPU_CHECKS")
    if place:
        own = [item for item in session.items if item.path.parent == HERE]
        limits = {item: item.get_closest_marker("timeout") for item in own}
        checks = [
            {
                "name": _in_this_folder(item.path, item.nodeid),
                "limit": limit.args[0] if limit else 0,
                "alone": item.get_closest_marker("alone") is not None,
            }
            for item, limit in limits.items()
        ]
        Path(place).write_text(json.dumps(checks))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """For `run_checks.py`: a file that cannot be imported is a row of the table."""
    if report.failed and "GPU_CHECKS" in os.environ:
        _record(check=Path(report.nodeid).name, outcome="failed", figure=_last_line(report.longreprtext))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """For `run_checks.py`: how it went, and the figure that the check has recorded."""
    if report.when != "call" and report.passed:
        return
    if report.skipped:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        outcome, figure = "skipped", why.removeprefix("Skipped: ")
    else:
        figures = ", ".join(f"{name} {value}" for name, value in report.user_properties if name != "used")
        outcome, figure = report.outcome, figures if report.passed else f"{figures} {_last_line(report.longreprtext)}"
    _record(
        check=_in_this_folder(Path(report.location[0]), report.nodeid),
        outcome=outcome,
        figure=figure.strip()[:300],
        seconds=round(report.duration, 1),
    )


def _in_this_folder(file: Path, nodeid: str) -> str:
    """The file and the name of a check: with which folder pytest's own name begins depends on the call."""
    return f"{file.name}::{nodeid.split('::', 1)[1]}"


def _last_line(text: str) -> str:
    """What went wrong, of a report: its last line that says so."""
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return errors[0] if errors else text.strip().rpartition("\n")[2]


def _record(**row: Any) -> None:
    place = os.environ.get("GPU_RESULTS")
    if place:
        with Path(place).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


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
