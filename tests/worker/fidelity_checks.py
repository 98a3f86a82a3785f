"""What each rank of test_fidelity.py does: real DDP under a hook, its gradients compared with the exact mean."""

from __future__ import annotations

import time
import weakref
from dataclasses import asdict
from typing import Any

import torch
from hook_checks import CAP, SHAPES, SIZES, Gradients, Targets, full_rank
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode

from autoddp.knobs import Configuration
from autoddp.worker.gradients.comparison import Comparison
from autoddp.worker.hooks import hook_for

WORLD = 3
STEPS = 4


class Waits(TorchDispatchMode):
    """Counts values that the host waits for."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


class Weighed(Comparison):
    """Knows what it still holds of the gradients."""

    def _take(self, order: int, parts: Any, exact: torch.Tensor, made: torch.Tensor) -> None:
        self.__dict__.setdefault("copies", []).append(weakref.ref(exact))
        super()._take(order, parts, exact, made)

    def held(self) -> float:
        """In parts of the gradients; gloo's threads may let go of a copy a moment after the reduction is over."""
        copies: list[Any] = self.__dict__.get("copies", [])
        for _ in range(1000):
            if not any(copy() is not None for copy in copies):
                break
            time.sleep(0.01)
        held = sum(copy().numel() for copy in copies if copy() is not None)
        return (held + sum(s.exact.numel() + s.difference.numel() for s in self.taken.sums.values())) / sum(SIZES)


def compared(
    knobs: dict[str, Any], scale: float = 1.0, poison: float | None = None, since: int = 0, **frugal: Any
) -> dict[str, Any]:
    """The error that the comparison finds, and the same figures worked out here from what DDP left in .grad."""
    ddp = DDP(Targets(SHAPES), bucket_cap_mb=CAP)
    state, hook = hook_for(Configuration(knobs), ddp.process_group, 0)
    comparison, group = Weighed(**frugal), ddp.process_group if frugal else None
    held, waits = 0.0, Waits()
    ddp.register_comm_hook(state, comparison.around(hook, ddp.process_group))
    rank = torch.distributed.get_rank()
    exact_sum, made_sum, relative = zeros(), zeros(), []
    squares = [[0.0, 0.0] for _ in SHAPES]
    for step in range(2 + STEPS):
        bad = poison if step >= since else None
        comparison.on = step >= 2  # DDP has rebuilt its buckets by then
        ddp.zero_grad()
        targets = poisoned(full_rank(rank, step, scale), bad)
        ddp(targets).backward()
        held = max(held, comparison.held()) if frugal else 0.0
        made = [value.grad.clone() for value in ddp.module.values]
        ddp.module.values[0].grad.zero_()  # the script may do what it likes with its gradients
        if not comparison.on:
            continue
        with waits:
            comparison.step()
        others = [poisoned(full_rank(other, step, scale), bad) for other in range(WORLD)]
        exact = [sum(parts) / WORLD for parts in zip(*others, strict=True)]
        difference = norm([a - b for a, b in zip(made, exact, strict=True)])
        relative.append(difference / norm(exact))
        for pair, a, b in zip(squares, made, exact, strict=True):
            pair[0] += norm([a - b]) ** 2
            pair[1] += norm([b]) ** 2
        exact_sum = [a + b for a, b in zip(exact_sum, exact, strict=True)]
        made_sum = [a + b for a, b in zip(made_sum, made, strict=True)]
    names = {id(p): name for name, p in ddp.module.named_parameters()}
    with waits:
        found = comparison.result(lambda identity: names[identity], group)
    assert found is not None
    of_sum = norm([a - b for a, b in zip(made_sum, exact_sum, strict=True)]) / norm(exact_sum)
    assert comparison.result(str) is None  # it begins anew
    own = {
        "own_relative": sum(relative) / STEPS,
        "own_of_sum": of_sum,
        "own_worst": max((difference / exact) ** 0.5 for difference, exact in squares),
        "own_worst_of_sum": max(norm([a - b]) / norm([b]) for a, b in zip(made_sum, exact_sum, strict=True)),
    }
    return {**asdict(found), **own, "held": held, "waits": waits.count}


def zeros() -> Gradients:
    return [torch.zeros(shape) for shape in SHAPES]


def norm(values: Gradients) -> float:
    return float(sum(value.double().square().sum() for value in values).sqrt())


def poisoned(targets: Gradients, value: float | None) -> Gradients:
    if value is not None:
        targets[3].view(-1)[5] = value
    return targets


def checks(rank: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    return {
        "fp16": compared({"hook": "fp16"}),
        "bf16": compared({"hook": "bf16"}),
        "fp16 tiny": compared({"hook": "fp16"}, scale=1e-8),
        "fp16 large": compared({"hook": "fp16"}, poison=3e5),
        "fp16 overflow": compared({"hook": "fp16"}, poison=3e5, since=1 + STEPS),
        "powersgd 1": compared({"hook": "powersgd", "powersgd_rank": 1}),
        "powersgd 8": compared({"hook": "powersgd", "powersgd_rank": 8}),
        "script's own overflow": compared({"hook": "bf16"}, poison=float("inf")),
        "watched bf16": compared({"hook": "bf16"}, sampled=0),
        "watched powersgd": compared({"hook": "powersgd", "powersgd_rank": 8}, sampled=150),
    }
