"""Measures what the real hooks cost in computing, with nothing to send."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from autoddp.knobs import Configuration
from autoddp.knobs.hook import HOOK_BY_NAME, HOOKS
from autoddp.worker.hooks.by_itself import FullBucket, by_itself, one_matrix
from autoddp.worker.process.device import synchronize

TIMED = tuple((hook.name, rank) for hook in HOOKS for rank in hook.timed_ranks)
"""Names of hooks, each with a rank, or 0."""
SIDES = (256, 1024, 2048)
"""Rows of the square float32 matrices: 256 KiB, 4 MiB, 16 MiB."""
Run = Callable[[FullBucket], "torch.futures.Future[torch.Tensor]"]


class HookCosts:
    """Times hooks. All ranks compute at the same time, as in training, each by itself."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._current: tuple[object, Run, FullBucket] | None = None

    def run(self, name: str, rank: int, side: int, iterations: int, blocks: int) -> list[float]:
        """Seconds per call of a hook, from gradient to reduced gradient, one value a block."""
        hook, bucket = self._prepared(name, rank, side)
        seconds = []
        for _ in range(blocks):
            synchronize(self._device)
            began = time.perf_counter()
            for _ in range(iterations):
                hook(bucket).wait()
            synchronize(self._device)
            seconds.append((time.perf_counter() - began) / iterations)
        return seconds

    def _prepared(self, name: str, rank: int, side: int) -> tuple[Run, FullBucket]:
        """Hook and bucket, kept from call to call because only PowerSGD's first step draws random factors."""
        what = (name, rank, side)
        if self._current is None or self._current[0] != what:
            hook = by_itself(Configuration(HOOK_BY_NAME[name].values(rank)))
            self._current = (what, hook, one_matrix(side, self._device))
        return self._current[1:]
