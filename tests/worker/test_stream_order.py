"""Each stream waits for what it needs, as torch's own sanitizer sees it; no GPU: see `stream_order`.

tests/gpu/test_gpu_stream_order.py does the same under that sanitizer on a real one.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from static_graphs import static_callables
from stream_order import FakeNccl, OrderedCuda, as_ddp_waits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from autoddp.knobs import Configuration, Rung
from autoddp.wire import WatchPlan
from autoddp.wire.experiment import ON_DEVICE
from autoddp.worker.ddp.handlers import DdpEvents
from autoddp.worker.ddp.wrapped import Around, Wrapped
from autoddp.worker.gradients.buffers import LocalBuffers
from autoddp.worker.gradients.comparison import Comparison
from autoddp.worker.gradients.deferred import ImplicitNoSync
from autoddp.worker.gradients.monitor import Watch
from autoddp.worker.gradients.switch import ReductionSwitch
from autoddp.worker.graphs import Graphs
from autoddp.worker.observe.host_device import _HostCopy
from autoddp.worker.observe.loader import LoaderEvents, Loaders
from autoddp.worker.observe.stages import Stages
from autoddp.worker.observe.stopwatch import Stopwatch
from autoddp.worker.observe.timeline import Recording
from autoddp.worker.process import device as device_module

CPU = torch.device("cpu")
HOOKS: list[dict[str, object]] = [
    {},
    {"hook": "bf16"},
    {"hook": "fp16"},
    {"hook": "powersgd", "powersgd_rank": 1},
    {"hook": "powersgd", "powersgd_rank": 8, "powersgd_factors": "bf16"},
    {"hook": "powersgd", "powersgd_rank": 2, "powersgd_batched": True},
]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> OrderedCuda:
    fake = OrderedCuda()
    fake.install(monkeypatch)
    return fake


@pytest.fixture
def group(cuda: OrderedCuda) -> Iterator[FakeNccl]:
    dist.init_process_group("fake_nccl", store=dist.HashStore(), rank=0, world_size=2)
    group = dist.group.WORLD
    assert isinstance(group, FakeNccl)
    group.use(cuda)
    yield group
    dist.destroy_process_group()


class Job:
    """A training whose gradients DDP reduces in several buckets."""

    def __init__(self, group: FakeNccl) -> None:
        self.norm = nn.BatchNorm1d(40)
        self._module = nn.Sequential(nn.Linear(32, 40), self.norm, nn.ReLU(), nn.Linear(40, 24), nn.Linear(24, 3))
        arguments: dict[str, Any] = {
            "module": self._module,
            "process_group": group,
            "bucket_cap_mb": 0.002,
            "gradient_as_bucket_view": True,
        }
        self.ddp = DDP(**arguments)
        self.wrapped = Wrapped(self.ddp, arguments)
        self.events = DdpEvents()
        self.steps: Callable[[], object] = lambda: None
        """Called at the end of each step."""
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=0.01, momentum=0.9)

    def apply(self, hook: Mapping[str, object], around: Around = lambda hook, group, model: hook) -> None:
        self.wrapped.rebuild(
            Configuration(hook), 0, lambda hook, group, model: as_ddp_waits(around(hook, group, model))
        )
        if "hook" not in hook:
            model = self.wrapped.model
            self.wrapped.register_exact_hook(lambda hook, group: as_ddp_waits(around(hook, group, model)))

    def train(self, steps: int, optimizer_begins: Callable[[], object] = lambda: None) -> None:
        for _ in range(steps):
            self._optimizer.zero_grad()
            self.events.forward_begins(self.ddp)
            self.ddp(torch.randn(8, 32)).square().mean().backward()
            optimizer_begins()
            self._optimizer.step()
            self.steps()


def train_compared(group: FakeNccl, hook: Mapping[str, object]) -> None:
    """Train with a hook, in some steps compared with the exact mean, and as written again."""
    job, comparison = Job(group), Comparison()
    job.steps = comparison.step
    job.apply(hook, lambda hook, group, model: comparison.around(hook, group))
    job.train(3)
    comparison.on = True
    job.train(2)
    error = comparison.result(str)
    comparison.on = False
    job.apply({})
    job.train(1)
    assert error is not None
    assert error.finite


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: " ".join(map(str, hook.values())) or "exact")
def test_a_hook_and_its_comparison(cuda: OrderedCuda, group: FakeNccl, hook: dict[str, object]) -> None:
    with cuda.watching():
        train_compared(group, hook)
    assert cuda.races == []


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: " ".join(map(str, hook.values())) or "exact")
def test_after_a_backward_pass_nccl_holds_nothing(cuda: OrderedCuda, group: FakeNccl, hook: dict[str, object]) -> None:
    job, comparison = Job(group), Comparison(on=True)
    job.apply(hook, lambda hook, group, model: comparison.around(hook, group))
    job.train(1)
    group.look_again()
    held: list[int] = []
    job.train(2, lambda: held.append(sum(tensor.nbytes for tensor in group.held)))
    assert held == [0, 0]


def test_the_monitor_of_the_real_job(cuda: OrderedCuda, group: FakeNccl) -> None:
    told: list[str] = []
    watch = Watch(WatchPlan(Rung.NEAR, limit=1e-9, first=2, every=2, steps=4), told.append)
    with cuda.watching():
        job = Job(group)
        job.apply({"hook": "bf16"}, watch.around)
        job.train(8)
    assert cuda.races == []
    assert len(told) == 1  # it has looked, and gone back


def test_reductions_that_were_put_off(cuda: OrderedCuda, group: FakeNccl) -> None:
    with cuda.watching():
        job = Job(group)
        with job.ddp.no_sync():
            job.train(2, lambda: ImplicitNoSync.reduce([job.wrapped]))
    assert cuda.races == []
    assert group.held == []


def test_buffers_of_each_rank_are_broadcast_again(
    cuda: OrderedCuda, group: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DDP, "join_hook", DDP.join_hook)  # so that it comes back
    why: list[str] = []
    with cuda.watching():
        job = Job(group)
        buffers = job.events = LocalBuffers(ReductionSwitch(lambda ddp: job.wrapped), why.append)
        job.apply({"broadcast_buffers": False})
        buffers.built(job.wrapped)
        job.train(2)  # in the second one DDP makes its buckets anew, and broadcasts which they are
        group.names.clear()
        job.train(2)
        assert "broadcast" not in group.names
        job.norm.eval()
        job.train(2)
    assert cuda.races == []
    assert len(why) == 1
    assert "broadcast" in group.names


def train_with_graphs(group: FakeNccl) -> int:
    """Train with captured graphs, after some steps without; how often a graph has served."""
    job = Job(group)
    graphs = Graphs(lambda: [job.wrapped], lambda ddp: True, static_callables)
    job.apply({"hook": "bf16"})
    graphs.watch()
    job.steps = graphs.step
    job.train(3)
    graphs.stop_watching()
    assert graphs.why_not["model"] == ""
    graphs.set_mode("model")
    for _ in range(3):
        graphs.forward_begins(job.ddp)
        job.train(1)
    return graphs.replayed


def test_captures(cuda: OrderedCuda, group: FakeNccl) -> None:
    with cuda.watching():
        replayed = train_with_graphs(group)
    assert cuda.races == []
    assert replayed == 3


def test_stamps_are_read_when_the_device_has_reached_them(cuda: OrderedCuda, group: FakeNccl) -> None:
    """`OrderedCuda` refuses the time of an event for which the host has not waited."""
    with cuda.watching():
        job = Job(group)
        stopwatch, stages, recording = Stopwatch(CPU), Stages(), Recording(lambda: [job.wrapped])
        job.apply({"hook": "bf16"}, lambda hook, group, model: recording.around(hook, group))
        recording.prepare()
        stopwatch.start()
        job.steps = stopwatch.lap
        job.train(2)
        assert len(stopwatch.stop()) == 2
        stages.start(CPU)
        recording.begin(CPU, stages.zero)
        job.steps = stages.lap
        job.train(2)
        found = stages.stop()
        job.steps = recording.step
        job.train(2)
        recording.end()
        timeline = recording.taken(found.ends, found.spans)
    assert cuda.races == []
    assert len(found.ends) == 2
    assert len(timeline.buckets) > 1


def test_a_late_value_is_read_when_it_is_there(cuda: OrderedCuda) -> None:
    with cuda.watching():
        copy = _HostCopy(torch.ones(4).mul(2))
        value = copy.value()
        with cuda.on_stream(cuda.new_stream()):  # knows what the host has waited for, and no more
            value.clone()
    assert cuda.races == []


def prefetched(loader: Any, cuda: OrderedCuda) -> Iterator[torch.Tensor]:
    """Batches as timm's loader gives them: each is scaled on another stream, while the step before it runs.

    A batch that lies on the device already is not copied by `.to(device)`, so it is scaled in place.
    """
    stream = cuda.new_stream()
    ready = None
    for (batch,) in loader:
        with cuda.on_stream(stream):
            following = batch.sub_(0.5)
        if ready is not None:
            yield ready
        cuda.current_stream().wait_stream(stream)
        ready = following


@pytest.fixture
def loaders(monkeypatch: pytest.MonkeyPatch) -> Loaders:
    for of, name in ((_BaseDataLoaderIter, "__next__"), (_BaseDataLoaderIter, "_next_index"), (DataLoader, "__iter__")):
        monkeypatch.setattr(of, name, getattr(of, name))  # so that it comes back
    found = Loaders(LoaderEvents())
    found.install()
    return found


def read_kept_batches(cuda: OrderedCuda, loaders: Loaders, monkeypatch: pytest.MonkeyPatch) -> int:
    """Read a loader that keeps its batches, and then the kept ones from the device; how many of them were given."""
    loader = DataLoader(TensorDataset(torch.randn(96, 8)), batch_size=8)
    loaders.keep = True
    for _ in loader:
        pass
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor.clone())  # goes from the host to the device
    with cuda.watching():
        loaders.give_kept(True, memory=ON_DEVICE, device=CPU)
        total = torch.zeros(8)
        for batch in prefetched(loader, cuda):
            total += batch.sum(0)
        given = loaders.gave
        del batch
        loaders.give_kept(False)
    return given


def test_kept_batches_on_the_device(cuda: OrderedCuda, loaders: Loaders, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_kept_batches(cuda, loaders, monkeypatch) == 12
    assert cuda.races == []


# The checks see what they are for: a wait that is missing is told.


def nothing(*_: object) -> None:
    """Stands in the place of a wait."""


@contextlib.contextmanager
def at_once(device: torch.device) -> Iterator[None]:
    """The work of the context on a stream that waits for nothing."""
    with torch.cuda.stream(device_module._own_stream(device)):
        yield


def unwaited(flight: Any) -> torch.Tensor:
    """What PowerSGD's `_received` would be without its wait."""
    result: torch.Tensor = flight.wire.to(flight.bucket.dtype)
    return result


def impatient(work: Any, use: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """What `when_reduced` would be if it used the sum at once, on the stream of the backward pass."""
    used = use(work.get_future().value()[0])
    return work.get_future().then(lambda _: used)


RACE, FREED = "does not wait for", "is freed while stream"


def train_with_bf16(group: FakeNccl) -> None:
    train_compared(group, HOOKS[1])


def train_with_powersgd(group: FakeNccl) -> None:
    train_compared(group, HOOKS[3])


@pytest.mark.parametrize(
    ("train", "place", "instead", "told"),
    [
        (train_with_bf16, "hooks.sixteen_bit.when_reduced", impatient, RACE),
        (train_with_bf16, "gradients.comparison.keep_for_current_stream", nothing, FREED),
        (train_with_powersgd, "hooks.powersgd.beside_the_current_stream", at_once, RACE),
        (train_with_powersgd, "hooks.powersgd._received", unwaited, RACE),
        (train_with_graphs, "graphs.capture.on_a_side_stream", at_once, RACE),
    ],
)
def test_a_missing_wait_is_told(
    cuda: OrderedCuda,
    group: FakeNccl,
    monkeypatch: pytest.MonkeyPatch,
    train: Callable[[FakeNccl], object],
    place: str,
    instead: object,
    told: str,
) -> None:
    replace(monkeypatch, place, instead)
    with cuda.watching():
        train(group)
    assert any(told in race for race in cuda.races)


@pytest.mark.parametrize(
    ("place", "instead", "told"),
    [
        ("observe.loader.ready_at_once", contextlib.nullcontext, RACE),
        ("observe.loader.keep_for_current_stream", nothing, FREED),
    ],
)
def test_a_batch_that_is_not_there_is_told(
    cuda: OrderedCuda, loaders: Loaders, monkeypatch: pytest.MonkeyPatch, place: str, instead: object, told: str
) -> None:
    replace(monkeypatch, place, instead)
    read_kept_batches(cuda, loaders, monkeypatch)
    assert any(told in race for race in cuda.races)


def replace(monkeypatch: pytest.MonkeyPatch, place: str, instead: object) -> None:
    """Replace a function of a module, which is known by its full name: some packages have a function of that name."""
    module, _, function = place.rpartition(".")
    monkeypatch.setattr(importlib.import_module(f"autoddp.worker.{module}"), function, instead)


def test_a_buffer_that_nobody_waits_for_stays(
    cuda: OrderedCuda, group: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_before(work: Any, use: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        return work.get_future().then(lambda future: use(future.value()[0]))

    monkeypatch.setattr("autoddp.worker.hooks.sixteen_bit.when_reduced", as_before)
    job = Job(group)
    job.apply({"hook": "bf16"})
    job.train(1)
    assert sum(tensor.nbytes for tensor in group.held) > 0


def test_a_stamp_that_is_read_too_early_is_refused(
    cuda: OrderedCuda, group: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoddp.worker.observe.stopwatch.synchronize", nothing)
    with cuda.watching():
        watch = Stopwatch(CPU)
        watch.start()
        torch.ones(1).mul(2)
        watch.lap()
        with pytest.raises(RuntimeError, match="not ready"):
            watch.stop()
