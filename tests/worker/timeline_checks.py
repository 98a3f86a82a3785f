"""What each rank of test_timeline.py does: real DDP trainings, each with some steps recorded and without."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

from autoddp import codec
from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.timing.timeline import Span
from autoddp.wire import BlockDone, Finish, Measure, Message
from autoddp.worker.ddp.arguments import AVAILABLE_ARGUMENTS
from autoddp.worker.ddp.patch import Patch
from autoddp.worker.effects.compiling import Compiling
from autoddp.worker.gradients.access import add_handler
from autoddp.worker.gradients.switch import ReductionSwitch
from autoddp.worker.observe.stopwatch import Stopwatch
from autoddp.worker.observe.timeline import Recording
from autoddp.worker.process.rank_store import RankStore
from autoddp.worker.trial.experiments import Experiments
from autoddp.worker.trial.live_ddp import DdpObjects, LiveDdp
from autoddp.worker.trial.runner import TrialRunner

WIDTH, LAYERS = 64, 4
PARAMETERS = 2 * LAYERS
RECORDED = range(4, 7)
STEPS = 10
SLOW = 0.06  # seconds
AHEAD = 1000.0  # seconds, of the clock of rank 1 in a runner's blocks


class Net(nn.Module):
    """The parameters of `unused` have no gradients; `norm` has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.norm(layer(x).tanh())
        return x


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding(x.abs().sum(dim=1).long() % 10)


def train(
    rank: int,
    patch: Patch,
    recording: Recording | None,
    *,
    model: Callable[[], nn.Module] = Net,
    script_hook: bool = False,
    knobs: dict[str, Any] | None = None,
    micro_batches: int = 1,
    models: int = 1,
    set_to_none: bool = True,
    joins: bool = False,
    cut_off: bool = False,
    slow: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    """One training; with `recording`, the steps of `RECORDED` are recorded."""
    torch.manual_seed(0)
    patch.wrapped = []
    patch.configuration = Configuration(knobs or {})
    ddps = [DDP(model(), bucket_cap_mb=arguments.pop("bucket_cap_mb", 0.01), **arguments) for _ in range(models)]
    if script_hook:
        ddps[0].register_comm_hook(ddps[0].process_group, allreduce_hook)
    optimizer = torch.optim.SGD([p for ddp in ddps for p in ddp.parameters()], lr=0.1, momentum=0.9)
    torch.manual_seed(1 + rank)
    found: dict[str, Any] = {"digests": []}
    stamps: list[float] = []
    with contextlib.ExitStack() as stack:
        if joins:
            stack.enter_context(ddps[0].join())
        for step in range(STEPS):
            if recording and step == RECORDED.start - 1:
                recording.prepare()
            if recording and step == RECORDED.start:
                recording.begin(torch.device("cpu"))
                stamps = [time.perf_counter()]
            for ddp in ddps:
                for part in range(micro_batches):
                    with ddp.no_sync() if part < micro_batches - 1 else contextlib.nullcontext():
                        loss = ddp(torch.randn(8, WIDTH)).square().mean()
                        if slow and rank == 1:
                            time.sleep(SLOW)
                        loss.backward()
            optimizer.step()
            found["digests"].append(digest(ddps))
            optimizer.zero_grad(set_to_none=set_to_none)
            if recording and step in RECORDED:
                recording.step()
                stamps.append(time.perf_counter())
            if recording and step == (RECORDED.start if cut_off else RECORDED[-1]):
                found["anew"] = recording.end()
                ends = [stamp - stamps[0] for stamp in stamps]
                spans = [Span("forward", begin, end) for begin, end in pairwise(ends)]
                found["timeline"] = codec.plain(recording.taken(ends[1:], spans))
    found["left over"] = [p for ddp in ddps for p in ddp.parameters() if p._post_accumulate_grad_hooks]
    found["hooks"] = [len(ddp._comm_hooks) for ddp in ddps]
    found["attributes"] = [sorted(vars(ddp)) for ddp in ddps]
    return found


def digest(ddps: list[DDP]) -> str:
    """Of parameters, buffers and gradients."""
    values = [value for ddp in ddps for value in ddp.state_dict().values()]
    values += [p.grad.to_dense() for ddp in ddps for p in ddp.parameters() if p.grad is not None]
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one bucket": {"bucket_cap_mb": 25},
    "view": {"gradient_as_bucket_view": True},
    "view that stays": {"gradient_as_bucket_view": True, "set_to_none": False},
    "unused": {"find_unused_parameters": True, "model": Unused},
    "static graph": {"static_graph": True},
    "no_sync": {"micro_batches": 2},
    "two models": {"models": 2},
    "bf16": {"knobs": {"hook": "bf16"}},
    "powersgd": {"knobs": {"hook": "powersgd", "powersgd_rank": 2}},
    "script's hook": {"script_hook": True},
    "sparse": {"model": Sparse},
    "join": {"joins": True},
    "cut off": {"cut_off": True},
    "slow": {"slow": True},
}
if "batched_grad_copy" in AVAILABLE_ARGUMENTS:
    CASES["copied at once"] = {"batched_grad_copy": True}


def checks(rank: int) -> dict[str, Any]:
    patch = Patch()
    recording = Recording(patch.alive)
    patch.around = lambda hook, group, _: recording.around(hook, group)
    patch.install()
    return {
        name: {
            "without": train(rank, patch, None, **case) if name != "slow" else {},
            "recorded": train(rank, patch, recording, **case),
        }
        for name, case in CASES.items()
    }


class Orders:
    """A study that measures the blocks of `asked` one after the other."""

    def __init__(self, *asked: Measure) -> None:
        self._asked = iter([*asked, Finish()])
        self.blocks: list[BlockDone] = []
        self.at: list[float] = []
        """When each block was here; one clock on all ranks."""

    def next(self, done: BlockDone | None) -> Message:
        if done is not None:
            time.sleep(0.05)  # a launcher that is busy
            self._keep(done)
        return next(self._asked)

    def heard(self, done: BlockDone) -> None:
        self._keep(done)

    def _keep(self, done: BlockDone) -> None:
        self.at.append(time.monotonic())
        self.blocks.append(done)

    def finish(self, order: Finish) -> None:
        raise StopIteration


def blocks(rank: int) -> list[Any]:
    """The blocks that the runner measures on a training whose rank 1 is slow and has a wrong clock."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    port = int(os.environ["MASTER_PORT"])
    host: Any = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False) if rank == 0 else None
    store = RankStore()
    if rank == 1:
        store.clock_offset = functools.partial(store.clock_offset, lambda: time.perf_counter() + AHEAD, "")
    patch, counted = Patch(), []
    switch = ReductionSwitch(patch.of)
    experiments = Experiments(patch)
    patch.events = experiments.stages
    patch.install()
    switch.install()
    add_handler(experiments.stages)
    bf16 = Configuration({"hook": "bf16"})
    orders = Orders(
        Measure(0, AS_WRITTEN, 2, 2, timeline=3),
        Measure(1, bf16, 2, 1, compare=1, timeline=2),
        Measure(2, bf16, 0, 2, apply=False),
        Measure(3, AS_WRITTEN, 1, 1, reduce=False, anatomy=True, timeline=1),
    )
    ddp = DDP(Net(), bucket_cap_mb=0.01)
    experiments.install()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    model = LiveDdp(patch, switch, (DdpObjects(patch),), Compiling(patch.alive), experiments)
    runner = TrialRunner(model, store, orders, Stopwatch(torch.device("cpu")))
    loader = DataLoader(TensorDataset(torch.randn(400, WIDTH)), batch_size=8)
    try:
        for step, (batch,) in enumerate(loader):
            optimizer.zero_grad()
            time.sleep(0.01 * rank)
            ddp(batch).square().mean().backward()
            optimizer.step()
            counted.append(len(orders.blocks))
            runner.begin() if step == 0 else runner.on_step()
    except StopIteration:
        left = [len(ddp._comm_hooks), len([p for p in ddp.parameters() if p._post_accumulate_grad_hooks])]
        return [
            codec.encode(orders.blocks),
            [counted.count(block) for block in range(4)],
            left,
            host is None,
            orders.at,
        ]
    raise AssertionError("there were more orders than steps")


def checks_of_three(rank: int) -> dict[str, Any]:
    """A mean over three is rounded."""
    patch = Patch()
    recording = Recording(patch.alive)
    patch.around = lambda hook, group, _: recording.around(hook, group)
    patch.install()
    found = {"without": train(rank, patch, None), "recorded": train(rank, patch, recording)}
    dist.barrier()
    return found
