"""What one rank of sixteen asks of its process group, under many configurations one after another.

    ranks = in_waves(asked_by, WORLD, folder)
    ranks[3]         # {'11: hook="bf16"': [("all_reduce SUM", "torch.bfloat16 2048"), …], …}

The rank is alone in its process: `RecordingGroup` answers for the others. Its answers are the same on all ranks, as
those of real collectives are. What may differ between ranks differs: their data and the shape of it, what they print
and evaluate, when garbage is collected, and the order and the moments in which collectives end.
"""

import gc
import multiprocessing
import os
import queue
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from python_group import Call, PythonGroup
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import KNOBS, Configuration, Rung
from autoddp.knobs.base import Value
from autoddp.knobs.hook import POWERSGD_START_STEP
from autoddp.wire import WatchPlan
from autoddp.worker.ddp.arguments import AVAILABLE_ARGUMENTS
from autoddp.worker.ddp.handlers import DdpHandlers
from autoddp.worker.ddp.patch import Patch
from autoddp.worker.effects.compiling import Compiling
from autoddp.worker.gradients.access import add_handler
from autoddp.worker.gradients.accumulation import Accumulation
from autoddp.worker.gradients.buffers import LocalBuffers
from autoddp.worker.gradients.deferred import ImplicitNoSync
from autoddp.worker.gradients.monitor import Watch
from autoddp.worker.gradients.switch import ReductionSwitch
from autoddp.worker.gradients.views import BucketViews
from autoddp.worker.hooks.bucket import GradBucket
from autoddp.worker.trial.experiments import Experiments
from autoddp.worker.trial.live_ddp import DdpObjects, LiveDdp

WORLD, MIXTURES = 16, 30
STEPS, MICRO_BATCHES = 4, 2
PATIENCE = 20  # seconds
_AT_ONCE = 4  # ranks, on two cores: each of them often waits
Asked = list[tuple[str, ...]]

VALUES: dict[str, list[Value]] = {
    "bucket_cap_mb": [0.5, 100],
    "bucket_cap_mb_list": [(0.5, 1.0)],
    "gradient_as_bucket_view": [True, False],
    "batched_grad_copy": [True],
    "static_graph": [True],
    "broadcast_buffers": [False],
    "defer_reductions": [2],
    "accumulate_steps": [2],
    "hook": ["fp16", "bf16", "powersgd"],
    "powersgd_rank": [1, 4],
    "powersgd_batched": [True],
    "powersgd_factors": ["bf16"],
    "powersgd_start_step": [2],
}
"""Values of each knob that reaches DDP, its hook or its micro-batches."""
OTHERS = {"optimize_ddp", "cuda_graphs", "threads", "numa_binding"}
"""Knobs of the process that say nothing of collectives. Those of a new start are not here either."""


class RecordingGroup(PythonGroup):
    """Notes each collective. As with gloo, two threads take them in order; each takes its time, of this rank's own."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.asked: Asked = []
        self._begun: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        for number in range(2):
            luck = random.Random(2 * rank + number)
            threading.Thread(target=self._end_works, args=(luck,), daemon=True).start()

    def collective(self, call: Call) -> dist.Work:
        self.asked.append(call.what)
        work = _Work(call, len(self.asked))
        self._begun.put(work)
        return work

    def _end_works(self, luck: random.Random) -> None:
        while True:
            work = self._begun.get()
            time.sleep(luck.choice((0.0, 0.0, 0.0005)))
            work.end()
            del work  # with its tensors, which nobody may hold any more


class _Work(dist.Work):
    def __init__(self, call: Call, number: int) -> None:
        super().__init__()
        self._call, self._number = call, number
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._over = threading.Event()

    @torch.no_grad()
    def end(self) -> None:
        """Give the answer.

        A sum depends on nothing but the number of the collective, and on what was asked. What else DDP asks for
        (shapes, buckets, parameters) is the same on all ranks.
        """
        for tensor in self._call.received:
            if self._call.name == "all_gather":
                tensor.copy_(self._call.sent[0])
            elif self._call.name == "all_reduce" and tensor.is_floating_point():
                # Some sums in float16 overflow: their buckets are sent again.
                overflows = tensor.dtype is torch.float16 and self._number % 17 == 0
                tensor.fill_(float("inf") if overflows else (1 + self._number % 7) * 1e-3)
        self._future.set_result(self._call.received)
        self._over.set()  # after the callbacks, as gloo does it

    def wait(self, timeout: Any = None) -> bool:
        assert self._over.wait(PATIENCE), "a wait without an end"
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future


dist.Backend.register_backend(
    "recording", lambda _store, rank, size, _timeout: RecordingGroup(rank, size), devices=["cpu"]
)


def configurations() -> dict[str, Configuration]:
    """Each value once, with what it needs beside it, and mixtures."""
    found = [Configuration(_completed({name: value})) for name, values in VALUES.items() for value in values]
    luck = random.Random(16)
    while len(found) < sum(map(len, VALUES.values())) + MIXTURES:
        names = luck.sample(sorted(VALUES), luck.randint(2, 6))
        try:
            found.append(Configuration(_completed({name: luck.choice(VALUES[name]) for name in names})))
        except ValueError:  # knobs that exclude each other
            continue
    missing = {knob.name for knob in KNOBS if knob.reach.name == "DDP"} - AVAILABLE_ARGUMENTS
    return {f"{number}: {one}": one.without(missing) for number, one in enumerate(found)}


def _completed(values: dict[str, Value]) -> dict[str, Value]:
    if any(name.startswith("powersgd_") for name in values):
        values["hook"] = "powersgd"
    if values.get("hook") == "powersgd":
        values.setdefault("powersgd_rank", 2)
    return values


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(40, 160), nn.BatchNorm1d(160), nn.ReLU(), nn.Linear(160, 400))
        self.head = nn.Linear(400, 300)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(x))
        return out


class _Worker(DdpHandlers):
    """What the worker has around the models, without the launcher's end."""

    def __init__(self) -> None:
        self.patch = Patch()
        self.patch.events = self
        switch = ReductionSwitch(self.patch.of)
        self.deferred = ImplicitNoSync(switch, self.patch.alive)
        self.accumulation = Accumulation(switch, self.patch.alive, self.deferred, _fail)
        self.buffers = LocalBuffers(switch, _fail)
        super().__init__([self.buffers, self.deferred, self.accumulation, BucketViews(switch, _ignore)])
        self.patch.install()
        switch.install()
        add_handler(self.deferred)
        add_handler(self.accumulation)
        effects = (self.deferred, self.accumulation, DdpObjects(self.patch))
        self.live = LiveDdp(self.patch, switch, effects, Compiling(self.patch.alive), Experiments(self.patch))
        compared = self.patch.around
        assert compared is not None
        self._compared = compared

    def apply(self, configuration: Configuration) -> None:
        # A trial compresses from its first step; the real job begins where the configuration says.
        self.patch.start_step = POWERSGD_START_STEP.of(configuration) or 0
        # One for each configuration, as in a job: what it gives up once it gives up for good.
        watch, compared = Watch(WatchPlan(Rung.NEAR, limit=1e9, first=4, every=3, steps=1), _ignore), self._compared
        self.patch.around = lambda hook, group, model: watch.around(compared(hook, group, model), group, model)
        self.live.apply(configuration)
        for wrapped in self.patch.alive():
            self.buffers.built(wrapped)  # in the real job, models are built with the configuration


def _ignore(_why: str) -> None:
    """Of what changes no collective, and of what all ranks say."""


def _fail(why: str) -> None:
    raise AssertionError(why)


def in_waves(ask: Callable[[int], Any], ranks: Sequence[int], folder: Path) -> list[Any]:
    """What `ask`, a module's top-level function, returns on each rank; four ranks at a time, each in a process."""
    multiprocessing.set_forkserver_preload(["torch.distributed", "torch._dynamo"])
    for first in range(0, len(ranks), _AT_ONCE):
        wave = ranks[first : first + _AT_ONCE]
        mp.start_processes(_ask, (wave, ask, folder), nprocs=len(wave), start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt") for rank in ranks]


def _ask(number: int, wave: Sequence[int], ask: Callable[[int], Any], folder: Path) -> None:
    gc.freeze()  # what the server has imported is no garbage
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rank = wave[number]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(rank % 8)}
    dist.init_process_group("recording", store=dist.HashStore(), rank=rank, world_size=WORLD)
    torch.save(ask(rank), folder / f"{rank}.pt")
    sys.stdout.flush()
    os._exit(0)  # threads that end works are still there


def recording_group() -> RecordingGroup:
    """The group of this process."""
    group = dist.group.WORLD
    assert isinstance(group, RecordingGroup)
    return group


def from_callbacks(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook that asks for its second collective when the first has ended, as torch's own PowerSGD does."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def second(_first: torch.futures.Future[list[torch.Tensor]]) -> None:
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        work.get_future().then(lambda _: done.set_result(bucket.buffer()))

    first = torch.zeros(1 + bucket.index())
    dist.all_reduce(first, group=group, async_op=True).get_future().then(second)
    return done


def asked_from_callbacks(rank: int) -> Asked:
    """The collectives of this rank under `from_callbacks`."""
    ddp = DDP(_Model(), bucket_cap_mb=0.05)
    ddp.register_comm_hook(dist.group.WORLD, from_callbacks)
    for _ in range(2 * STEPS):
        ddp(torch.randn(4, 40)).square().mean().backward()
    return recording_group().asked


def asked_by(rank: int) -> dict[str, Asked]:
    """Configuration → the collectives of this rank under it."""
    worker, group = _Worker(), recording_group()
    torch.manual_seed(0)  # parameters are the same on all ranks
    ddp = DDP(_Model(), bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    data, luck = torch.Generator().manual_seed(rank), random.Random(rank)
    found = {}
    for name, configuration in configurations().items():
        group.asked = found[name] = []
        worker.apply(configuration)
        for step in range(STEPS):
            worker.live.compare(step == 1)
            for _ in range(MICRO_BATCHES):
                batch = torch.randn(luck.randint(2, 6), 40, generator=data) * luck.choice((1e-3, 1.0, 1e3))
                ddp(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            worker.live.step_compared()
            if luck.random() < 0.02:
                gc.collect()
            if rank == 0:  # evaluates, and prints
                with torch.no_grad():
                    ddp.module(batch).sum().item()
        worker.live.gradient_error()
    return found
