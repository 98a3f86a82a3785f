"""What each of two gloo ranks does that share one device: `on_ranks(2, functools.partial(checks, "cuda"), folder)`.

NCCL takes no two ranks on one GPU, and gloo reduces what lies on one, so one GPU is enough to see ranks that differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.worker.ddp.handlers import DdpEvents
from autoddp.worker.ddp.patch import Patch
from autoddp.worker.ddp.wrapped import Wrapped
from autoddp.worker.effects.compiling import Compiling
from autoddp.worker.gradients.access import add_handler
from autoddp.worker.gradients.deferred import ImplicitNoSync
from autoddp.worker.gradients.switch import ReductionSwitch
from autoddp.worker.observe.step_clock import StepClock
from autoddp.worker.trial.experiments import Experiments
from autoddp.worker.trial.live_ddp import LiveDdp

MICRO_BATCHES = (2, 2, 2, 1, 2, 1)
"""Of each step: those of one come earlier than a job that defers has learned, as the last one of an epoch does."""
EARLY_AND_INFINITE = 3
LOCALLY_INFINITE = (4, 5)
STEPS = 8


def checks(device_type: str, rank: int) -> dict[str, Any]:
    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    patch = Patch()
    switch = ReductionSwitch(patch.of)
    implicit_no_sync = ImplicitNoSync(switch, patch.alive)
    patch.events = Events(implicit_no_sync)
    patch.install()
    switch.install()
    clock = Clock()  # before the implicit_no_sync, as in a tuning job
    add_handler(implicit_no_sync)
    live = LiveDdp(patch, switch, (), Compiling(patch.alive), Experiments(patch))
    as_written = fused(rank, device, no_sync)
    implicit_no_sync.every = 2
    deferred = fused(rank, device, lambda ddp, last: contextlib.nullcontext())
    implicit_no_sync.every = 1
    return {
        "fused as written": as_written,
        "fused deferred": deferred,
        "locally infinite": locally_infinite(rank, device, live, clock),
        "kept apart": kept_apart(rank, device, live),
    }


class Events(DdpEvents):
    def __init__(self, implicit_no_sync: ImplicitNoSync) -> None:
        self._implicit_no_sync = implicit_no_sync

    def forward_begins(self, ddp: DDP) -> None:
        self._implicit_no_sync.forward_begins(ddp)

    def returned(self, ddp: DDP, what: Any) -> Any:
        return self._implicit_no_sync.returned(ddp, what)


class Clock:
    """A step clock over one model, from `begin` on, and how many boundaries it has told."""

    def __init__(self) -> None:
        self.boundaries = 0
        self._wrapped: list[Wrapped] = []
        StepClock(lambda: self._wrapped, self._on_step, lambda ddp: True)

    def begin(self, ddp: DDP) -> None:
        self._wrapped = [Wrapped(ddp, {})]

    def _on_step(self) -> None:
        self.boundaries += 1


def no_sync(ddp: DDP, last: bool) -> Any:
    """The loop as one writes it."""
    return contextlib.nullcontext() if last else ddp.no_sync()


def fused(rank: int, device: torch.device, around: Callable[[DDP, bool], Any]) -> dict[str, Any]:
    """Micro-batches with a fused optimizer, which leaves looking for infinite gradients to the scaler.

    In one early step the second rank alone has some.
    """
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(4, 4).to(device))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0, growth_interval=1000)
    scales = []
    for step, micro_batches in enumerate(MICRO_BATCHES):
        for micro in range(micro_batches):
            x = torch.full((2, 4), 0.1 * (1 + rank + step + micro), device=device)
            if step == EARLY_AND_INFINITE and rank == 1:
                x.fill_(float("inf"))
            with around(ddp, micro == micro_batches - 1):
                scaler.scale(ddp(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return {"scales": scales, "parameters": [p.detach().cpu() for p in ddp.parameters()]}


def locally_infinite(rank: int, device: torch.device, live: LiveDdp, clock: Clock) -> dict[str, Any]:
    """Steps without reduction, of which the second rank leaves some out; then the ranks are put together again."""
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(4, 4).to(device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0, growth_interval=1000)
    clock.begin(ddp)
    live.reduce(False)
    boundaries = []
    for step in range(STEPS):
        x = torch.full((2, 4), 0.1 * (1 + rank), device=device)
        if rank == 1 and step in LOCALLY_INFINITE:
            x.fill_(float("inf"))
        scaler.scale(ddp(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        boundaries.append(clock.boundaries)
    apart = [p.detach().cpu().clone() for p in ddp.parameters()]
    live.reduce(True)
    together = [p.detach().cpu() for p in ddp.parameters()]
    return {"boundaries": boundaries, "scale": scaler.get_scale(), "apart": apart, "together": together}


class Apart(nn.Module):
    """Each rank has an adapter of its own, which DDP is told to ignore, and a weight that is not contiguous."""

    _ddp_params_and_buffers_to_ignore = ("adapter",)

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3).t())
        self.adapter = nn.Parameter(torch.full((3,), float(rank)))
        self.register_buffer("shared", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.adapter) @ self.weight


def kept_apart(rank: int, device: torch.device, live: LiveDdp) -> dict[str, list[float]]:
    """What each rank has after reduction was off, while each went its own way, and on again."""
    ddp = DDP(Apart(rank).to(device))
    live.reduce(False)
    with torch.no_grad():
        ddp.module.weight += rank
        ddp.module.shared += rank
    live.reduce(True)
    return {name: value.flatten().tolist() for name, value in ddp.module.state_dict().items()}
