"""What hooks cost in computing: the real ones, on a group of one rank, where an all-reduce moves nothing."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from autoddp.knobs import Configuration
from autoddp.worker.device import synchronize
from autoddp.worker.hooks import Hook, hook_for

HOOKS = (("fp16", 0), ("bf16", 0), ("powersgd", 1), ("powersgd", 2), ("powersgd", 4))
"""Hook and PowerSGD rank."""
SIDES = (256, 1024, 2048)
"""Of square float32 matrices: 256 KiB, 4 MiB, 16 MiB."""


class OneMatrix:
    """A bucket with one gradient: as much of torch's GradBucket as the hooks look at."""

    def __init__(self, side: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self._buffer = torch.randn(side * side, generator=generator).to(device)
        self._gradient = self._buffer.view(side, side)

    def buffer(self) -> torch.Tensor:
        """The flat bucket."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views into it."""
        return [self._gradient]

    def parameters(self) -> list[torch.Tensor]:
        """Only their identity counts."""
        return [self._gradient]

    def index(self) -> int:
        """Of the bucket in its step."""
        return 0

    def is_last(self) -> bool:
        """Of the step, so PowerSGD ends its pipeline here."""
        return True


class HookCosts:
    """Ranks compute at the same time, as they do in training; each in a group of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # With local synchronization, or each rank would have to take part in making everybody's group.
        self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        self._current: tuple[object, Any, Hook, OneMatrix] | None = None

    def run(self, name: str, rank: int, side: int, iterations: int, blocks: int) -> list[float]:
        """Seconds per call, from gradient to gradient, one value a block.

        It contains the calls of the all-reduces, some tens of microseconds each, which the script pays in any case.
        """
        state, hook, bucket = self._prepared(name, rank, side)
        seconds = []
        for _ in range(blocks):
            synchronize(self._device)
            began = time.perf_counter()
            for _ in range(iterations):
                hook(state, bucket).wait()  # type: ignore[arg-type]  # a duck of a bucket
            synchronize(self._device)
            seconds.append((time.perf_counter() - began) / iterations)
        return seconds

    def _prepared(self, name: str, rank: int, side: int) -> tuple[Any, Hook, OneMatrix]:
        """State and bucket live on from call to call: PowerSGD's first step draws its factors, later ones do not."""
        what = (name, rank, side)
        if self._current is None or self._current[0] != what:
            values = {"hook": name, "powersgd_rank": rank} if rank else {"hook": name}
            made = hook_for(Configuration(values), self._alone, start_step=0)
            assert made is not None, what
            self._current = (what, *made, OneMatrix(side, self._device))
        return self._current[1:]
