"""Measures what the real hooks cost in computing, on a group of one rank, where an all-reduce moves nothing."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from autoddp.knobs import Configuration
from autoddp.worker.device import synchronize
from autoddp.worker.hooks import Hook, hook_for

HOOKS = (("fp16", 0), ("bf16", 0), ("powersgd", 1), ("powersgd", 2), ("powersgd", 4))
"""Hooks, each with its PowerSGD rank, or 0."""
SIDES = (256, 1024, 2048)
"""Rows of the square float32 matrices: 256 KiB, 4 MiB, 16 MiB."""


class OneMatrix:
    """A bucket with one gradient. It has those methods of torch's GradBucket that the hooks use."""

    def __init__(self, side: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self._buffer = torch.randn(side * side, generator=generator).to(device)
        self._gradient = self._buffer.view(side, side)

    def buffer(self) -> torch.Tensor:
        """The flat bucket."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """The gradients, as views of the bucket."""
        return [self._gradient]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters; the hooks use only their identity."""
        return [self._gradient]

    def index(self) -> int:
        """The number of the bucket in its step."""
        return 0

    def is_last(self) -> bool:
        """Whether this is the step's last bucket, at which PowerSGD drains its pipeline."""
        return True


class HookCosts:
    """Times hooks. All ranks compute at the same time, as in training, each in a group of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Without local synchronization each rank would have to take part in making the groups of all others.
        self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        self._current: tuple[object, Any, Hook, OneMatrix] | None = None

    def run(self, name: str, rank: int, side: int, iterations: int, blocks: int) -> list[float]:
        """Seconds per call of a hook, from gradient to reduced gradient, one value a block.

        They include the calls of the all-reduces, some tens of microseconds each, which a script pays in any case.
        """
        state, hook, bucket = self._prepared(name, rank, side)
        seconds = []
        for _ in range(blocks):
            synchronize(self._device)
            began = time.perf_counter()
            for _ in range(iterations):
                hook(state, bucket).wait()  # type: ignore[arg-type]  # it has all the methods that hooks use
            synchronize(self._device)
            seconds.append((time.perf_counter() - began) / iterations)
        return seconds

    def _prepared(self, name: str, rank: int, side: int) -> tuple[Any, Hook, OneMatrix]:
        """State, hook and bucket, kept from call to call because only PowerSGD's first step draws random factors."""
        what = (name, rank, side)
        if self._current is None or self._current[0] != what:
            values = {"hook": name, "powersgd_rank": rank} if rank else {"hook": name}
            made = hook_for(Configuration(values), self._alone, start_step=0)
            assert made is not None, what
            self._current = (what, *made, OneMatrix(side, self._device))
        return self._current[1:]
