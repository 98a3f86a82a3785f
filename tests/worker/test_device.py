"""What is timed, awaited and seeded is the device of the model, also where the process's current one is another.

No GPU: `FakeCuda` has two, of which the first is the current one. tests/gpu has the same checks on real ones.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from fake_cuda import FakeCuda
from torch import nn

from autoddp.knobs import AS_WRITTEN
from autoddp.wire import BlockDone, Delay, Finish, Measure, Message
from autoddp.worker.ddp.private import backend_of
from autoddp.worker.gradients.comparison import SAMPLED
from autoddp.worker.graphs.capture import Sample, capture
from autoddp.worker.graphs.signature import signature_of
from autoddp.worker.observe.stages import Stages
from autoddp.worker.observe.stopwatch import Stopwatch
from autoddp.worker.process.device import (
    Backlog,
    as_current,
    finish_queued_work,
    frees_memory,
    keep_busy,
    memory_reserved,
    seed,
)
from autoddp.worker.trial import runner, tuning
from autoddp.worker.trial.live_ddp import LiveDdp

SOURCES = sorted((Path(__file__).resolve().parents[2] / "autoddp").rglob("*.py"))
SECOND = torch.device("cuda", 1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def model_with(*parameters: Any) -> Any:
    """As much of a `Wrapped` as a turn without effects looks at."""
    return SimpleNamespace(parameters=list(parameters), leave_out_samples=lambda: None)


def test_steps_are_timed_on_the_models_device(cuda: FakeCuda) -> None:
    watch = Stopwatch(SECOND)
    watch.start()
    for seconds in (0.5, 0.25):
        cuda.run(SECOND.index, seconds)
        watch.lap()
    assert watch.stop() == pytest.approx([0.5, 0.25])
    assert cuda.waited == [1, 1]
    assert cuda.contexts == {1}


def test_a_device_is_stuck_in_what_it_does_not_finish(cuda: FakeCuda) -> None:
    backlog, stream = Backlog(SECOND), cuda.streams[SECOND.index]
    assert not backlog.is_stuck()
    for _ in range(3):  # at work, each time on something new
        cuda.run(SECOND.index, 0.5)
        assert not backlog.is_stuck()
        stream.done += 0.5
    cuda.run(SECOND.index, 0.5)
    assert not backlog.is_stuck()
    assert [backlog.is_stuck() for _ in range(3)] == [True] * 3
    stream.done += 0.5
    assert not backlog.is_stuck()
    assert cuda.contexts == {1}
    assert cuda.waited == []
    assert not Backlog(torch.device("cpu")).is_stuck()


def test_a_cpus_steps_need_no_device(cuda: FakeCuda) -> None:
    watch = Stopwatch(torch.device("cpu"))
    watch.start()
    watch.lap()
    assert len(watch.stop()) == 1
    assert cuda.contexts == set()


@pytest.mark.parametrize(("kind", "ends"), [("cpu", False), ("cuda:1", False), ("xpu", True), ("hpu", True)])
def test_a_model_whose_steps_nothing_waits_for_ends_tuning(
    monkeypatch: pytest.MonkeyPatch, kind: str, ends: bool
) -> None:
    said: list[str] = []
    monkeypatch.setattr(tuning, "stopper", lambda socket: said.append)
    monkeypatch.setattr(tuning, "keep_compilers_out", lambda: None)
    config = SimpleNamespace(socket="")
    job: Any = SimpleNamespace(handlers=[], accumulation=None, wrapped_any=True, _started=0, _config=config)
    wrapped = SimpleNamespace(ddp=None, parameters=[SimpleNamespace(device=torch.device(kind))])
    tuning._TuningJob.built(job, wrapped)  # type: ignore[arg-type]
    assert [kind in why for why in said] == [True] * ends


def test_a_delay_lies_on_the_models_stream(cuda: FakeCuda) -> None:
    """A host that runs ahead of its device would make up for a sleep."""
    keep_busy(SECOND, 0.0)  # measures the clock
    before = cuda.streams[1].seconds
    waited = list(cuda.waited)
    keep_busy(SECOND, 0.25)
    assert cuda.streams[1].seconds - before == pytest.approx(0.25)
    assert cuda.waited == waited
    assert cuda.contexts == {1}
    cuda.captures = True
    keep_busy(SECOND, 0.25)
    keep_busy(torch.device("cpu"), 0.25)
    assert cuda.streams[1].seconds - before == pytest.approx(0.25)
    assert cuda.streams[0].seconds == 0


def test_a_delayed_stage_is_late_on_host_and_device(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    stages = Stages()
    stages.delay, stages.delays_on = Delay(stages.rank, "forward", 0.25), SECOND
    keep_busy(SECOND, 0.0)
    before = cuda.streams[1].seconds
    for stage in ("data", "forward", "backward", "forward"):
        stages.enter(stage)
    assert slept == [0.25]
    assert cuda.streams[1].seconds - before == pytest.approx(0.25)
    stages.lap()
    stages.enter("forward")
    assert slept == [0.25, 0.25]


def test_a_turn_waits_for_the_devices_of_all_models(cuda: FakeCuda) -> None:
    cpu, second = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(device=SECOND)
    models = [model_with(cpu), model_with(second, second)]
    patch: Any = SimpleNamespace(alive=lambda: models)
    LiveDdp(patch, None, (), None, None).synchronize()  # type: ignore[arg-type]
    assert cuda.waited == [1]
    assert cuda.contexts == {1}


def test_no_other_devices_random_numbers_are_seeded(cuda: FakeCuda) -> None:
    before = torch.get_rng_state()
    seed(SECOND, 7)
    assert cuda.seeds == {1: [7]}
    assert torch.initial_seed() == 7
    torch.set_rng_state(before)


def test_the_current_device_is_the_scripts_again(cuda: FakeCuda) -> None:
    with as_current(SECOND):
        assert cuda.current == 1
    assert cuda.current == 0


def test_memory_is_that_of_the_models_device(cuda: FakeCuda) -> None:
    cuda.reserved = {0: 5, 1: 7}
    assert [memory_reserved(device) for device in (SECOND, torch.device("cpu"))] == [7, 0]


def test_an_allocator_that_tells_nothing_of_its_memory(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda.memory.change_current_allocator` puts one in the place of torch's; RAPIDS' is one."""

    def refuses(device: object) -> int:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")

    for name in ("memory_stats", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, refuses)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda number: number == SECOND.index, raising=False)
    assert not frees_memory(SECOND)
    assert memory_reserved(SECOND) == 0
    finish_queued_work(10.0)
    assert cuda.waited == [SECOND.index]


def test_a_graph_is_of_one_device() -> None:
    module, given = nn.Linear(2, 2, device="meta"), torch.ones(1, 2)
    signature, tensors = signature_of((given,), {})
    with pytest.raises(RuntimeError, match="is on several devices: meta, cpu"):
        capture([Sample(module, module, signature, tensors, None)], torch.cuda.make_graphed_callables)


@pytest.mark.parametrize(("free", "given_back"), [(20, 0), (5, 1)])
def test_spare_memory_is_given_back_where_the_device_is_nearly_full(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, free: int, given_back: int
) -> None:
    given: list[int] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 100), raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(cuda.current))
    models = [model_with(SimpleNamespace(device=SECOND))]
    patch: Any = SimpleNamespace(alive=lambda: models)
    LiveDdp(patch, None, (), None, None).apply(AS_WRITTEN)  # type: ignore[arg-type]
    assert given == [1] * given_back


def test_spare_memory_is_given_back_also_while_a_rank_waits_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The communication benchmark needs some on the same device, where the script's cache has taken nearly all."""
    rested, orders = threading.Event(), [Measure(0, AS_WRITTEN, warmup=0, steps=0, apply=False), Finish()]

    def next_order(done: BlockDone | None) -> Message:
        assert done is None or rested.wait(100)
        return orders.pop(0)

    monkeypatch.setattr(runner, "_RESTS", 0.01)
    model: Any = MagicMock(compilations=0, rest=rested.set)
    ranks: Any = SimpleNamespace(
        rank=0, broadcast=lambda order: order, gather=lambda of_rank: [of_rank], part=lambda: None
    )
    director: Any = SimpleNamespace(next=next_order, finish=lambda _: None)
    runner.TrialRunner(model, ranks, director, Stopwatch(torch.device("cpu"))).begin()
    assert orders == []


@pytest.mark.parametrize(("free", "sampled"), [(160, None), (159, SAMPLED)])
def test_sums_over_steps_are_of_a_sample_where_the_device_has_no_room(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, free: int, sampled: int | None
) -> None:
    """The two sums take 80 bytes, and as many are left for the script."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1000), raising=False)
    models = [model_with(SimpleNamespace(device=SECOND, numel=lambda: 10, element_size=lambda: 4))]
    patch: Any = SimpleNamespace(alive=lambda: models)
    live = LiveDdp(patch, None, (), None, None)  # type: ignore[arg-type]
    live.compare(True)
    assert live._comparison.sampled == sampled


@pytest.fixture
def group_without_a_backend() -> Iterator[dist.ProcessGroup]:
    """What `init_process_group()` makes."""
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_backend_is_that_of_the_models_device(
    group_without_a_backend: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(device: torch.device) -> str:
        parameters = [SimpleNamespace(device=device)]
        ddp: Any = SimpleNamespace(process_group=group_without_a_backend, _module_parameters=parameters)
        return backend_of(ddp)

    cpu = torch.device("cpu")
    assert of(cpu) == "gloo"
    for config, expected in {
        "cpu:gloo,cuda:nccl": ("gloo", "nccl"),
        "cpu:gloo,cuda:gloo": ("gloo", "gloo"),
        "cuda:nccl": ("undefined", "nccl"),
        "cpu:gloo,cuda:nccl-lazy": ("gloo", "nccl"),  # since torch 2.15, as are nccl2 and nccl-legacy
    }.items():
        monkeypatch.setattr(dist, "get_backend_config", lambda group, config=config: config)
        assert (of(cpu), of(SECOND)) == expected


ON_THE_CURRENT_DEVICE = {
    "synchronize", "current_stream", "default_stream", "memory_reserved", "memory_allocated", "memory_stats",
    "max_memory_allocated", "mem_get_info", "get_device_name", "get_device_properties", "current_device", "Stream",
    "reset_peak_memory_stats", "record", "manual_seed_all", "get_rng_state", "set_rng_state",
}  # fmt: skip
"""Functions of torch.cuda that act on the current device unless one is given, and those that act on all."""


def calls_of_the_wrong_kind(source: str) -> list[str]:
    """`torch.cuda.f()` and `event.record()` with no argument; `torch.manual_seed`, which seeds every GPU.

    And `torch.where` with a number: it is copied to the device, and the host waits for that until all that was queued
    before is done.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of, name = ast.unparse(node.func.value), node.func.attr
            bare = name in ON_THE_CURRENT_DEVICE and not (node.args or node.keywords)
            number = name == "where" and any(isinstance(argument, ast.Constant) for argument in node.args)
            if (bare and (of == "torch.cuda" or name == "record")) or (of, name) == ("torch", "manual_seed") or number:
                found.append(f"{of}.{name}")
    return found


def test_nothing_acts_on_whatever_device_is_current_or_waits_for_a_number() -> None:
    found = {path.name: calls_of_the_wrong_kind(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {name: calls for name, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "line", ["torch.cuda.synchronize()", "event.record()", "torch.manual_seed(0)", "torch.where(finite, x, 0.0)"]
)
def test_the_check_sees(line: str) -> None:
    assert len(calls_of_the_wrong_kind(line)) == 1
