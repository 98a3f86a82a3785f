"""What each rank of test_unreduced.py does: loops in which DDP reduces in each step, now and then, or never."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.worker.ddp.patch import Patch
from autoddp.worker.ddp.private import store_of
from autoddp.worker.ddp.unreduced import STEPS, Unreduced, compare
from autoddp.worker.gradients.access import remove_handler
from autoddp.worker.gradients.switch import ReductionSwitch

WORLD = 2


def averaged(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor.div_(WORLD)


def loop(patch: Patch, how: str) -> list[str]:
    """What was told on this rank."""
    told: list[str] = []
    switch = ReductionSwitch(patch.of)
    patch.events = watching = Unreduced(patch.alive, switch, lambda found: compare(patch.alive(), found, told.append))
    torch.manual_seed(0)
    model = DDP(nn.Linear(8, 8))
    beside = DDP(nn.Linear(8, 8)) if how == "one of two" else None
    sgd = torch.optim.SGD([p for one in (model, beside) if one for p in one.parameters()], lr=0.1)
    source = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS + 5):
        inputs = torch.randn(4, 8, generator=source)
        sgd.zero_grad()
        alone = how == "no_sync" or (how == "sometimes" and step % 12 != 11)
        with model.no_sync() if alone else contextlib.nullcontext():
            direct = how in ("direct", "gradients", "parameters", "one of two", "every sixth")
            (model.module if direct else model)(inputs).square().sum().backward()
        if beside is not None:
            beside(inputs).square().sum().backward()
        if how == "gradients":
            averaged([p.grad for p in model.parameters()])
        sgd.step()
        if how == "parameters" or (how == "every sixth" and step % 6 == 5):
            averaged([p.data for p in model.parameters()])
    dist.barrier()
    if dist.get_rank() == 0:
        store_of(model).delete_key("autoddp/unreduced/said")
    dist.barrier()
    remove_handler(watching)
    return told


def checks(rank: int) -> dict[str, Any]:
    patch = Patch()
    patch.install()
    ways = "direct", "no_sync", "plain", "sometimes", "gradients", "parameters", "every sixth", "one of two"
    return {how: loop(patch, how) for how in ways}
