"""What each rank of test_gradient_monitor.py does: real DDP under a watched hook, whose gradients turn bad."""

from __future__ import annotations

from typing import Any

import torch
from hook_checks import CAP, SHAPES, Gradients, Targets, full_rank, low_rank, mean_of
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import Configuration, Rung
from autoddp.wire import WatchPlan
from autoddp.worker.ddp.wrapped import model_of
from autoddp.worker.gradients.monitor import Watch
from autoddp.worker.hooks import hook_for

WORLD = 3
STEPS = 24
TURN = 10
"""The step from which on gradients are bad."""


def watched(rank: int, knobs: dict[str, Any], bad: Any, **plan: Any) -> dict[str, Any]:
    """The relative error of each step, what was told, and the parameters' sum in the end."""
    ddp = DDP(Targets(SHAPES), bucket_cap_mb=CAP)
    state, hook = hook_for(Configuration(knobs), ddp.process_group, 0)
    told: list[str] = []
    watch = Watch(WatchPlan(**plan), told.append)
    ddp.register_comm_hook(state, watch.around(hook, ddp.process_group, model_of(ddp)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    errors = []
    for step in range(STEPS):
        of = bad if step >= TURN else low_rank
        optimizer.zero_grad()
        ddp(of(rank, step)).backward()
        exact = mean_of(lambda r, of=of, step=step: of(r, step))
        made = [value.grad for value in ddp.module.values]
        errors.append(norm([a - b for a, b in zip(made, exact, strict=True)]) / norm(exact))
        optimizer.step()
    return {"errors": errors, "told": told, "parameters": [p.detach().clone() for p in ddp.parameters()]}


def norm(values: Gradients) -> float:
    return float(sum(value.double().square().sum() for value in values).sqrt())


def overflowing(rank: int, step: int) -> Gradients:
    """Finite in float32 on every rank; on rank 1 too large for float16."""
    targets = low_rank(rank, step)
    if rank == 1:
        targets[4].view(-1)[3] = 4e5
    return targets


def one_cancels(rank: int, step: int) -> Gradients:
    """Of one small parameter, the gradients of all ranks nearly cancel: rounding leaves nothing of their mean."""
    targets = low_rank(rank, step)
    targets[5] = targets[5] * 1e-6 + (rank - 1)
    return targets


def passes_zero(rank: int, step: int) -> Gradients:
    """The same in one step of many, as of a parameter that is a single number."""
    return one_cancels(rank, step) if step == TURN else low_rank(rank, step)


def checks(rank: int) -> dict[str, Any]:
    near = {"rung": Rung.NEAR, "limit": 0.02, "first": 3, "every": 100, "steps": 1}
    lossy = {"rung": Rung.LOSSY, "limit": 0.8, "first": 3, "every": 6, "steps": 3}
    powersgd = {"hook": "powersgd", "powersgd_rank": 2}
    return {
        "overflow": watched(rank, {"hook": "fp16"}, overflowing, **near),
        "one cancels": watched(rank, {"hook": "bf16"}, one_cancels, **{**near, "every": 5}),
        "passes zero": watched(rank, {"hook": "bf16"}, passes_zero, **{**near, "first": TURN + 1}),
        "tiny": watched(rank, {"hook": "fp16"}, lambda r, s: full_rank(r, s, 1e-8), **{**near, "every": 5}),
        "noise": watched(rank, powersgd, full_rank, **lossy),
        "good": watched(rank, powersgd, low_rank, **lossy),
    }
