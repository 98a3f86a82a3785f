"""What each rank of test_hooks.py does: real DDP with several buckets, under each hook.

A `Targets` model's gradient on a rank is exactly the target it is given there, so the exact mean is known.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import Configuration
from autoddp.worker.ddp.arguments import AVAILABLE_ARGUMENTS
from autoddp.worker.hooks import hook_for

WORLD = 3
SHAPES = [(64, 48), (33,), (64, 48), (48, 64), (16, 4, 3, 3), (1, 40), (64, 48)]
SIZES = [torch.Size(shape).numel() for shape in SHAPES]
COMPRESSED = [0, 2, 3, 4, 6]
STEPS = 40
"""In which most of what compression leaves out comes later."""
CAP = 0.0118  # MiB: about one matrix a bucket
Gradients = list[torch.Tensor]


class Targets(nn.Module):
    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.values = nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def forward(self, targets: Gradients) -> torch.Tensor:
        return torch.stack([(value * target).sum() for value, target in zip(self.values, targets, strict=True)]).sum()


class Job:
    """A DDP model under one hook; `reduce(targets)` is what DDP leaves in the gradients."""

    def __init__(self, cap: float = CAP, start: int = 0, model: nn.Module | None = None, **knobs: Any) -> None:
        self.ddp = DDP(model or Targets(SHAPES), bucket_cap_mb=cap)
        self.state, hook = hook_for(Configuration(knobs), self.ddp.process_group, start)
        self.buckets: dict[int, list[int]] = {}
        places = {id(value): place for place, value in enumerate(self.ddp.module.values)}

        def watched(state, bucket):  # DDP reads a hook's annotations and wants its own types there
            if bucket.index() == 0:
                self.buckets = {}
            self.buckets[bucket.index()] = [places[id(p)] for p in bucket.parameters()]
            return hook(state, bucket)

        self.ddp.register_comm_hook(self.state, watched)

    def reduce(self, targets: Gradients) -> Gradients:
        self.ddp.zero_grad()
        self.ddp(targets).backward()
        return [value.grad.clone() for value in self.ddp.module.values]


def full_rank(rank: int, step: int = 0, scale: float = 1.0) -> Gradients:
    source = torch.Generator().manual_seed(100 * step + rank)
    return [scale * torch.randn(shape, generator=source) for shape in SHAPES]


def low_rank(rank: int, step: int) -> Gradients:
    """Matrices of rank 2 whose mean over the ranks has rank 2 as well: all share their rows' space."""
    shared = torch.Generator().manual_seed(7)
    own = torch.Generator().manual_seed(1000 + 100 * step + rank)
    found = []
    for shape in SHAPES:
        rows, columns = shape[0], int(torch.tensor(shape[1:]).prod())
        if len(shape) == 1:
            found.append(torch.randn(shape, generator=own))
        else:
            matrix = torch.randn(rows, 2, generator=own) @ torch.randn(2, columns, generator=shared)
            found.append(matrix.view(shape))
    return found


def mean_of(targets: Callable[[int], Gradients]) -> Gradients:
    return [torch.stack(parts).mean(dim=0) for parts in zip(*map(targets, range(WORLD)), strict=True)]


def error(found: Gradients, expected: Gradients) -> list[float]:
    """For each gradient the largest difference, in units of the largest expected value."""
    pairs = zip(found, expected, strict=True)
    return [float((f.float() - e.float()).abs().max() / e.abs().max().clamp_min(1e-30)) for f, e in pairs]


def sixteen_bit(rank: int, name: str) -> dict[str, Any]:
    job = Job(hook=name)
    errors = [error(job.reduce(full_rank(rank, s)), mean_of(lambda r, s=s: full_rank(r, s))) for s in range(3)]
    large = job.reduce([torch.full(shape, 60_000.0) for shape in SHAPES])
    return {
        "errors": errors,
        "buckets": len(job.buckets),
        "large": error(large, [torch.full(shape, 60_000.0) for shape in SHAPES]),
    }


def low_rank_is_exact(rank: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    job = Job(CAP * dtype.itemsize / 4, model=Targets(SHAPES).to(dtype), hook="powersgd", powersgd_rank=2)
    steps = range(4)
    found = [error(job.reduce(low_rank(rank, s)), mean_of(lambda r, s=s: low_rank(r, s))) for s in steps]
    return {"errors": found, "buckets": len(job.buckets)}


def feedback(rank: int, cap: float, width: int = 2, steps: int = STEPS, **knobs: Any) -> dict[str, Any]:
    """The same full-rank gradients again and again: what is left out must come later, and nothing else."""
    job, mean = Job(hook="powersgd", powersgd_rank=width, cap=cap, **knobs), mean_of(full_rank)
    total = [torch.zeros(shape) for shape in SHAPES]
    after = {}
    first = [part.clone() for part in job.reduce(full_rank(rank))]
    for step in range(1, steps):
        for part, gradient in zip(total, job.reduce(full_rank(rank)), strict=True):
            part += gradient
        after[step] = error([part / step for part in total], mean)
    owed = owed_by(job)
    # DDP rebuilds its buckets after the first step; what that step left out may be carried over, or dropped then.
    dropped = error([(part + debt) / (steps - 1) for part, debt in zip(total, owed, strict=True)], mean)
    carried = error([(part + debt + f) / steps for part, debt, f in zip(total, owed, first, strict=True)], mean)
    return {"after": after, "books": [min(pair) for pair in zip(dropped, carried, strict=True)]}


def owed_by(job: Job) -> Gradients:
    """The mean over the ranks of what compression has left out so far."""
    owed = [torch.zeros(shape) for shape in SHAPES]
    for index, places in job.buckets.items():
        if job.state.batched:
            whole = torch.cat([job.state.memory.errors[index][0].flatten(), torch.zeros(sum(SIZES))])
            parts = whole[: sum(SIZES[place] for place in places)].split([SIZES[place] for place in places])
            for place, part in zip(places, parts, strict=True):
                owed[place] = part.clone().view(SHAPES[place])
            continue
        left = [place for place in places if place in COMPRESSED]
        shapes = list(dict.fromkeys(matrix_shape(SHAPES[place]) for place in left))
        for shape, stack in zip(shapes, job.state.memory.errors[index], strict=True):
            same = [place for place in left if matrix_shape(SHAPES[place]) == shape]
            for place, matrix in zip(same, stack, strict=True):
                owed[place] = matrix.clone().view(SHAPES[place])
    for matrix in owed:
        dist.all_reduce(matrix.div_(WORLD))
    return owed


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], int(torch.tensor(shape[1:]).prod())


def start_step(rank: int) -> list[list[float]]:
    job, mean = Job(start=2, hook="powersgd", powersgd_rank=1), mean_of(full_rank)
    return [error(job.reduce(full_rank(rank)), mean) for _ in range(4)]


def after_bad_steps(rank: int, good: int, bad: float) -> list[list[float]]:
    """Gradients that are all zero (an expert that nobody asks) or overflow (AMP finds its scale), then good ones."""
    job = Job(hook="powersgd", powersgd_rank=2)
    for step in range(good):
        job.reduce(low_rank(rank, step))
    for _ in range(3):
        job.reduce([torch.full(shape, bad) for shape in SHAPES])
    return [error(job.reduce(low_rank(rank, s)), mean_of(lambda r, s=s: low_rank(r, s))) for s in range(3)]


def beside_a_busy_layer(rank: int) -> list[float]:
    """Of two equal layers in one bucket only one has a gradient: what is owed to it must not reach the other."""
    job = Job(25.0, model=Targets([(64, 48)] * 2), hook="powersgd", powersgd_rank=1)
    busy = full_rank(rank)[0]
    return [float(job.reduce([busy, torch.zeros(64, 48)])[1].abs().max()) for _ in range(3)]


def delayed(rank: int, arguments: dict[str, Any] | None = None, **knobs: Any) -> dict[str, Any]:
    """Eight layers, one a bucket, each rank's backward slowed down here and there."""
    torch.manual_seed(1)
    layers = [layer for _ in range(8) for layer in (nn.Linear(48, 48), nn.Tanh())]
    ddp = DDP(nn.Sequential(*layers), **(arguments or {"bucket_cap_mb": 0.009}))
    ddp.register_comm_hook(*hook_for(Configuration(knobs), ddp.process_group, 0))
    source, losses = random.Random(rank), []
    for parameter in ddp.parameters():
        parameter.register_hook(lambda _gradient: time.sleep(source.choice([0, 0, 0.001, 0.004])))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5, momentum=0.9)
    inputs = torch.randn(32, 48, generator=torch.Generator().manual_seed(rank))
    for _ in range(10):
        loss = (ddp(inputs) - inputs.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    data = b"".join(p.detach().numpy().tobytes() for p in ddp.parameters())
    return {"digest": hashlib.sha256(data).hexdigest(), "losses": losses}


def checks(rank: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    found = {
        "fp16": sixteen_bit(rank, "fp16"),
        "bf16": sixteen_bit(rank, "bf16"),
        "low rank": low_rank_is_exact(rank),
        "low rank bfloat16": low_rank_is_exact(rank, torch.bfloat16),
        "feedback": {cap: feedback(rank, cap) for cap in (CAP, 25.0)},
        "batched": {cap: feedback(rank, cap, 8, powersgd_batched=True) for cap in (CAP, 25.0)},
        "bf16 factors": feedback(rank, CAP, steps=10, powersgd_factors="bf16"),
        "start step": start_step(rank),
        "zeros first": after_bad_steps(rank, 0, 0.0),
        "zeros later": after_bad_steps(rank, 3, 0.0),
        "overflow": after_bad_steps(rank, 3, float("inf")),
        "busy layer": beside_a_busy_layer(rank),
    }
    found["random numbers untouched"] = bool(torch.equal(before, torch.get_rng_state()))
    found["delayed"] = {
        "powersgd": delayed(rank, hook="powersgd", powersgd_rank=2),
        "batched": delayed(rank, hook="powersgd", powersgd_rank=4, powersgd_batched=True, powersgd_factors="bf16"),
        "bf16": delayed(rank, hook="bf16"),
    }
    for name in ("bucket_cap_mb", "bucket_cap_mb_list"):
        if name in AVAILABLE_ARGUMENTS:
            # DDP numbers no buckets in the first pass over a static graph with a plan.
            arguments = {"static_graph": True, name: 0.009 if name == "bucket_cap_mb" else [0.009] * 8}
            found["delayed"][f"static graph, {name}"] = delayed(rank, arguments, hook="powersgd", powersgd_rank=2)
    return found
