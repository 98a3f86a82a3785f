"""Real DDP on two gloo ranks with sleeps in each stage: what `worker.observe.stages` and the experiments make of it."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, default_collate, get_worker_info

from autoddp.timing import STAGES
from autoddp.wire import AS_IT_IS, ON_DEVICE, PINNED, Delay, Experiment
from autoddp.worker.ddp.handlers import DdpEvents
from autoddp.worker.ddp.patch import Patch
from autoddp.worker.gradients.access import GradientHandler, add_handler
from autoddp.worker.observe import loader
from autoddp.worker.observe.collectives import collectives
from autoddp.worker.trial.experiments import Experiments

SLEEP = 0.03  # seconds, in each stage of each step
STEPS = 6
EPOCH = 5  # batches of a short epoch
SAMPLES = 128  # of the data set
ADDED = 128 * 2**20  # bytes, which take gloo on one machine more than 10 ms, also on a fast one


class _Numbers(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, alone: bool) -> None:
        self.alone = alone

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        time.sleep(SLEEP / 2)  # batches of two
        if self.alone and get_worker_info() is not None:
            raise RuntimeError("this data set has one reader")
        return torch.full((4,), float(place)), place


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP)
        return x.clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP)
        return gradient


class _Sent(TorchDispatchMode):
    """Notes the bytes of each all-reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket is torch.ops.c10d.allreduce_:
            self.bytes += [tensor.nbytes for tensor in args[0]]
        return function(*args, **(kwargs or {}))


class _Plain:
    """Holds a value. Neither DDP nor pytrees look into an object of a class that they do not know."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Model(nn.Module):
    returns_object = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> Any:
        found = self.last(_Backward.apply(self.first(x)))
        return _Plain(found) if self.returns_object else found


class _Slow(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        time.sleep(SLEEP)
        super().step(closure)


class _Script(DdpEvents, GradientHandler):
    """A training script, its DDP model, and the events that the tuning job would pass on."""

    def __init__(self, rank: int, alone: bool = False) -> None:
        torch.manual_seed(0)
        multiprocessing.set_start_method("fork", force=True)  # as in a script that has not chosen one
        self.alone = alone
        self.rank, self.patch = rank, Patch()
        self.patch.events = self
        self.patch.install()
        self.experiments = Experiments(self.patch)
        self.experiments.stages.rank = rank
        add_handler(self.experiments.stages)
        self.experiments.watch_collectives()
        self.experiments.install()
        self.model = DDP(_Model())
        self.optimizer = _Slow(self.model.parameters(), lr=1e-4)
        self.places: list[int] = []
        self.batches = self._endless()
        self.edits = self.validates = self.meets = self.waits = self.penalizes = False
        self.evaluates = self.evaluates_late = False
        self.batch_of: Callable[[Any], Any] = lambda batch: batch

    def _endless(self) -> Any:
        self.loader = DataLoader(_Numbers(self.alone), batch_size=2, collate_fn=self._collate)
        while True:
            yield from self.loader

    def _collate(self, rows: Any) -> Any:
        return self.batch_of(default_collate(rows))

    def forward_begins(self, ddp: DDP) -> None:
        self.experiments.stages.forward_begins(ddp)

    def called(self, ddp: DDP, args: Any, kwargs: Any) -> None:
        self.experiments.stages.called(ddp, args, kwargs)

    def returned(self, ddp: DDP, what: Any) -> Any:
        return self.experiments.stages.returned(ddp, what)

    def steps(self, count: int) -> None:
        for _ in range(count):
            batch = next(self.batches)
            x, places = getattr(batch, "value", batch)
            self.places += places.tolist()
            if self.edits:
                x.zero_()
            if self.rank == 1:
                time.sleep(3 * SLEEP)  # other work
            if self.meets:
                dist.barrier()
                dist.all_gather_object([None] * 2, self.rank)
            if self.waits:
                work = dist.all_reduce(torch.zeros(1), async_op=True)
                assert work is not None
                work.wait()
            if self.validates:
                self.validated = len([places for _, places in self.loader])
            if self.evaluates:
                with torch.no_grad():
                    few = DataLoader(_Numbers(False), batch_size=4, sampler=range(12))
                    self.model.module(torch.cat([inputs for inputs, _ in few]))
            if self.evaluates_late:  # gradients are switched off for each batch, when it has been read
                self.model.eval()
                for inputs, _ in DataLoader(_Numbers(False), batch_size=4, sampler=range(12)):
                    with torch.no_grad():
                        self.model.module(inputs)
                self.model.train()
            self.optimizer.zero_grad()
            loss = self.model(x)
            loss = (loss.value if isinstance(loss, _Plain) else loss).sum()
            if self.penalizes:
                torch.autograd.grad(loss, self.model.module.first.bias, retain_graph=True)
            loss.backward()
            self.optimizer.step()
            self.experiments.stages.lap()

    def recorded(self, count: int) -> dict[str, Any]:
        self.experiments.record_stages(torch.device("cpu"))
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            self.steps(1)
            seconds.append(time.perf_counter() - began)
        stamps = len(self.experiments.stages._marks)
        found = self.experiments.recorded()
        places = range(len(STAGES))
        medians = [statistics.median(step[place] for step in found.stages) for place in places]
        least = [min(step[place] for step in found.stages) for place in places]
        most = [max(step[place] for step in found.stages) for place in places]
        sums = [sum(step[: len(STAGES)]) for step in found.stages]
        return {
            "seconds": statistics.median(seconds),
            "stamps": stamps / count,
            "of it in stages": statistics.median(a / b for a, b in zip(sums, seconds, strict=True)),
            **dict(zip(STAGES, medians, strict=True)),
            # What must be short is judged by its shortest step: a busy machine makes any of them longer.
            **{f"least {stage}": one for stage, one in zip(STAGES, least, strict=True)},
            # And how long one waits for the other by the longest: it may make the one that is early late, too.
            **{f"most {stage}": one for stage, one in zip(STAGES, most, strict=True)},
            "kept": found.kept,
            "samples": found.samples,
        }


def checks(rank: int) -> dict[str, Any]:
    script = _Script(rank)
    script.steps(2)
    found: dict[str, Any] = {"as written": script.recorded(STEPS)}
    script.meets = True
    found["meets"] = script.recorded(STEPS)
    script.meets, script.waits = False, True
    found["waits"] = script.recorded(STEPS)
    script.waits = False
    found["cost of a stamp"] = _cost_of_a_stamp(script)
    script.experiments.apply(Experiment(keep=True))
    script.steps(4)
    kept = script.places[-8:]
    script.experiments.apply(Experiment(kept_batches=(0, 1)))
    before = len(script.places)
    script.edits = True
    found["kept"] = script.recorded(STEPS)
    script.edits = False
    found["kept is given"] = script.places[before:] == (kept * 3)[: 2 * STEPS]
    script.experiments.apply(AS_IT_IS)
    script.experiments.apply(Experiment(kept_batches=(0, 1), loader_workers=2))
    chance, before = torch.get_rng_state(), len(script.places)
    script.steps(4)
    found["by workers"] = script.recorded(STEPS)
    others = [(place + 8 * cycle) % SAMPLES for cycle in (1, 2, 3) for place in kept]
    found["workers load"] = script.places[before:] == others[: 2 * (4 + STEPS)]
    found["same chance"] = torch.equal(chance, torch.get_rng_state())
    with torch.no_grad():
        found["validated"] = len([places for _, places in script.loader])
    script.validates = True
    script.steps(1)
    script.validates = False
    script.experiments.apply(AS_IT_IS)
    script.steps(1)
    found["validated in a step"] = script.validated
    found["goes on"] = script.places[-2:] == [(kept[-1] + 1) % SAMPLES, (kept[-1] + 2) % SAMPLES]
    script.experiments.apply(Experiment(kept_batches=(1,)))
    found["kept on rank 1"] = script.recorded(STEPS)
    script.experiments.apply(Experiment(kept_batches=(0, 1), memory=ON_DEVICE))
    before = len(script.places)
    found["kept on the device"] = script.recorded(STEPS)
    found["the same there"] = set(script.places[before:]) <= set(kept)
    script.experiments.apply(Experiment(kept_batches=(0, 1), memory=PINNED))
    found["kept in pinned memory"] = script.recorded(2)
    script.experiments.apply(Experiment(delay=Delay(0, "optimizer", SLEEP)))
    found["delayed"] = script.recorded(STEPS)
    script.experiments.apply(Experiment(added_bytes=ADDED))
    found["more bytes"] = script.recorded(STEPS)
    script.experiments.apply(Experiment(ddp_arguments={"broadcast_buffers": False}, threads=1))
    found["not broadcast"] = script.recorded(STEPS)
    found["broadcasts, changed"] = script.model.will_sync_module_buffers()
    script.experiments.apply(AS_IT_IS)
    found["undone"] = script.recorded(STEPS)
    script.experiments.forget()
    script.experiments.apply(Experiment(kept_batches=(0, 1)))
    found["forgotten"] = script.recorded(1)["kept"]
    script.experiments.apply(AS_IT_IS)
    found["broadcasts"] = script.model.will_sync_module_buffers()
    return found


def odd_scripts(rank: int) -> dict[str, Any]:
    """What scripts may do that the stages must see through."""
    script = _Script(rank)
    script.steps(2)
    script.batch_of = _Plain
    script.steps(1)
    found: dict[str, Any] = {"objects as batches": script.recorded(STEPS)}
    script.experiments.apply(Experiment(keep=True))
    script.steps(4)
    found["one of another loader"] = len([places for _, places in DataLoader(_Numbers(False), sampler=range(1))])
    found["stored"] = script.experiments._loaders.stored
    script.experiments.apply(Experiment(kept_batches=(0, 1)))
    script.edits = True
    before = len(script.places)
    found["kept"] = script.recorded(STEPS)
    found["kept is given"] = script.places[before:] == (script.places[before - 8 : before] * 3)[: 2 * STEPS]
    script.edits = False
    script.experiments.apply(Experiment(kept_batches=(0, 1), loader_workers=2))
    script.steps(1)
    script.batches = script._endless()  # a new epoch, with a new data set
    found["workers in a new epoch"] = script.recorded(2)
    script.experiments.apply(AS_IT_IS)
    script.model.module.returns_object = True
    found["object as output"] = script.recorded(STEPS)
    script.model.module.returns_object = False
    script.penalizes = True
    found["penalizes"] = script.recorded(STEPS)
    script.penalizes = False
    script.evaluates = True
    found["evaluates"] = script.recorded(STEPS)
    script.evaluates = False
    script.evaluates_late = True
    found["evaluates late"] = script.recorded(STEPS)
    script.evaluates_late = False
    script.model.eval()
    script.recorded(1)
    script.experiments.apply(Experiment(delay=Delay(0, "forward", SLEEP)))
    found["trains in eval mode"] = script.recorded(STEPS)
    return found


def one_reader(rank: int) -> dict[str, Any]:
    """A data set that no worker can read: kept batches are given, and it is told."""
    script = _Script(rank, alone=True)
    script.experiments.apply(Experiment(keep=True))
    script.steps(4)
    kept = script.places[-8:]
    script.experiments.apply(Experiment(kept_batches=(0, 1), loader_workers=2))
    found = script.recorded(2)
    return {"given": found["kept"], "as kept": script.places[-4:] == kept[:4]}


def killed_workers(rank: int) -> dict[str, Any]:
    """Our own workers are killed, as for want of memory, while the script is busy with something else."""
    loader._PATIENCE = 2.0
    script = _Script(rank)
    script.experiments.apply(Experiment(keep=True))
    script.steps(4)
    script.experiments.apply(Experiment(kept_batches=(0, 1), loader_workers=2))
    script.steps(1)
    for worker in script.experiments._loaders._kept[0].workers:
        worker.kill()
        time.sleep(SLEEP)  # Python's handlers of signals run here, and torch's raises
    script.steps(4)  # some may wait in the queue: copies follow
    return {"given from workers": script.experiments._loaders.gave}


def lengths_of_epochs(rank: int) -> dict[str, list[int]]:
    """Rank 1 alone is given kept batches: how many batches has each of its epochs?"""
    script = _Script(rank)
    found = {}
    for workers in (0, 1):
        lengths: list[int] = []
        script.batches = _epochs(lengths, workers)
        script.experiments.apply(Experiment(keep=True))
        script.steps(3)
        script.experiments.apply(Experiment(kept_batches=(1,)))
        script.steps(2 * EPOCH)
        script.experiments.apply(AS_IT_IS)
        script.steps(2 * EPOCH)
        script.experiments.forget()
        found[f"{workers} workers"] = lengths
    return found


def _epochs(lengths: list[int], workers: int) -> Iterator[Any]:
    """Batches of one epoch after another. Ranks meet after each one."""
    numbers = Subset(_Numbers(False), range(2 * EPOCH))
    loader = DataLoader(numbers, batch_size=2, num_workers=workers, persistent_workers=workers > 0)
    while True:
        lengths.append(0)
        for batch in loader:
            lengths[-1] += 1
            yield batch
        dist.barrier()


class _Odd(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> torch.Tensor:
        return torch.full((1 + place % 2, 4), float(place))


class _OddBatches(Sampler[Any]):
    """Batches of indices that cannot be copied, and nobody knows how many of them there are."""

    def __iter__(self) -> Iterator[Any]:
        for first in range(0, 8, 2):
            yield (place for place in (first, first + 1))

    def __len__(self) -> int:
        raise NotImplementedError


def _nested(samples: list[torch.Tensor]) -> Any:
    """A batch that has no shape."""
    return {"x": torch.nested.nested_tensor(samples)}


def odd_batches(rank: int) -> dict[str, Any]:
    """Whatever a loader gives, the script gets it."""
    script = _Script(rank)
    loader = DataLoader(_Odd(), batch_sampler=_OddBatches(), collate_fn=_nested)
    script.experiments.record_stages(torch.device("cpu"))
    given = []
    for experiment in (Experiment(keep=True), Experiment(kept_batches=(0, 1), loader_workers=1), AS_IT_IS):
        script.experiments.apply(experiment)
        given.append([batch["x"].size(0) for batch, _ in zip(loader, range(3), strict=False)])
    return {"given": given}


def compiled_collective(rank: int) -> dict[str, Any]:
    """torch.compile takes a function with a collective of the script's whole, as without autoddp."""
    script = _Script(rank)

    @torch.compile(fullgraph=True, backend="eager")
    def mean(x: torch.Tensor) -> torch.Tensor:
        total = x * 1
        dist.all_reduce(total)
        return total / 2

    script.experiments.record_stages(torch.device("cpu"))
    return {"mean": mean(torch.full((3,), float(rank))).tolist()}


def told(rank: int) -> dict[str, list[str]]:
    """What is told of calls that torch waits for, of one that it does not wait for, and of the wait for its end."""
    order: list[str] = []

    def begins() -> str:
        order.append("begins")
        return ""

    def so_far() -> list[str]:
        found, order[:] = list(order), []
        return found

    collectives.tell_waits(begins, lambda _stage: order.append("ends"))
    collectives.tells = True
    found, one = {}, torch.ones(1)
    for name, call in (("barrier", dist.barrier), ("all_reduce", lambda: dist.all_reduce(one))):
        call()
        found[name] = so_far()
    work = dist.all_reduce(one, async_op=True)
    found["started"] = so_far()
    work.wait()
    found["waited for"] = so_far()
    return found


def parameters_under_experiments(rank: int) -> dict[str, Any]:
    """The same steps, with what changes no arithmetic: the parameters must have the same bits."""
    script = _Script(rank)
    quiet = [Experiment(delay=Delay(1, "forward", 0.01)), Experiment(keep=True, added_bytes=1000)]
    changed = torch.get_num_threads()
    for experiment in quiet:
        script.experiments.apply(experiment)
        script.recorded(2)
    script.experiments.apply(Experiment(threads=1, ddp_arguments={"find_unused_parameters": True}))
    script.recorded(2)
    script.experiments.apply(AS_IT_IS)
    script.steps(2)
    torch.set_default_dtype(torch.float64)
    script.experiments.apply(Experiment(added_bytes=1000))
    added = script.experiments.stages.added
    assert added is not None
    with _Sent() as sent:
        added(script.optimizer)
    return {
        "parameters": [p.detach() for p in script.model.parameters()],
        "threads": torch.get_num_threads() == changed,
        "added in float64": sent.bytes,
    }


def parameters_as_written(rank: int) -> dict[str, Any]:
    script = _Script(rank)
    script.steps(8)
    return {"parameters": [p.detach() for p in script.model.parameters()]}


def _cost_of_a_stamp(script: _Script) -> float:
    """Of the fastest of ten rounds: a machine that stands still is no stamp."""
    stages, rounds, count = script.experiments.stages, list[float](), 2_000
    stages.start(torch.device("cpu"))
    for _ in range(10):
        began = time.perf_counter()
        for _ in range(count):
            stages.enter("other")
        rounds.append((time.perf_counter() - began) / count)
    stages.stop()
    return min(rounds)
