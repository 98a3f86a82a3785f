"""What each rank of test_own_graphs.py does: the worker under a recipe, in a script that captures its own CUDA graph.

There is no GPU here, so nothing is captured: the worker is told that the stream is being captured, for one step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.errors import JobStops
from autoddp.knobs import Configuration, Rung
from autoddp.wire import WatchPlan, WorkerConfig
from autoddp.worker.ddp import patch as ddp
from autoddp.worker.gradients import monitor as gradient_monitor
from autoddp.worker.job import applying


def trained(rank: int, knobs: dict[str, Any], eager: int, micro_batches: int = 1, captured: int = 1) -> dict[str, Any]:
    """`eager` steps, then one of which the last `captured` micro-batches are captured."""
    said: list[str] = []
    capturing = [False]
    for module in (ddp, gradient_monitor):
        module.is_capturing = lambda device: capturing[0]  # type: ignore[attr-defined]
    applying.tell = said.append  # type: ignore[attr-defined]
    torch.manual_seed(0)
    watch = WatchPlan(Rung.NEAR, limit=0.02, first=1, every=1, steps=1) if "hook" in knobs else None
    applying.start_applying(WorkerConfig(configuration=Configuration(knobs), watch=watch))
    model = DDP(nn.Linear(4, 4))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    after: list[torch.Tensor] = []
    before = torch.zeros(0)
    error = ""
    try:
        for step in range(eager + 1):
            sgd.zero_grad()
            before = parameters(model)
            for micro in range(micro_batches):
                capturing[0] = step == eager and micro_batches - micro <= captured
                model(torch.full((2, 4), 1.0 + rank + micro)).square().mean().backward()
                if capturing[0]:
                    after.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))
            sgd.step()
            capturing[0] = False
    except JobStops as failed:
        error = str(failed)
    moved = not torch.equal(before, parameters(model))
    return {"gradients": after, "said": said, "error": error, "moved": moved}


def parameters(model: DDP) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def deferred(rank: int) -> dict[str, Any]:
    return trained(rank, {"defer_reductions": 2}, eager=3, micro_batches=2, captured=2)


def deferred_in_the_middle(rank: int) -> dict[str, Any]:
    return trained(rank, {"defer_reductions": 2}, eager=3, micro_batches=2, captured=1)


def accumulated(rank: int) -> dict[str, Any]:
    return trained(rank, {"accumulate_steps": 4}, eager=5)


def accumulated_in_the_middle(rank: int) -> dict[str, Any]:
    return trained(rank, {"accumulate_steps": 4}, eager=5, micro_batches=2)


def monitored(rank: int) -> dict[str, Any]:
    return trained(rank, {"hook": "bf16"}, eager=3)
