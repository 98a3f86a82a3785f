"""Watches a near or lossy hook in the real job, and goes back to exact gradients where it is no longer good enough.

Every so many reductions the gradients of a few also travel whole and the two are compared. All ranks decide together,
by one small all-reduce of the norms, and change hooks at the same reduction. Of a bucket's exact mean only the norms
outlive its reduction, so a look takes no memory when the next forward pass needs it.
"""

# DDP reads a hook's annotations and wants its own types there: no `from __future__ import annotations`.
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from autoddp.knobs import why_refused
from autoddp.wire import WatchPlan
from autoddp.worker.device import is_capturing
from autoddp.worker.fidelity import Comparison
from autoddp.worker.hooks import Hook
from autoddp.worker.hooks.bucket import GradBucket
from autoddp.worker.hooks.exact import exact_mean

_SAMPLED = 2**17  # elements of a bucket: their norm is right within a percent, and the two sums take 1 MiB


class Watch:
    """`around` is what `ddp.Around` asks for; `tell` hears once, on every rank, why the hook was given up."""

    def __init__(self, plan: WatchPlan, tell: Callable[[str], None]) -> None:
        self._plan = plan
        self._tell = tell

    def around(self, hook: Hook, group: dist.ProcessGroup) -> Hook:
        """The hook, as long as it is good enough; then the exact mean."""
        guard = _Guard(self._plan, group, self._tell)
        compared = guard.comparison.around(hook, group)

        def watched(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            guard.call(state, bucket)
            return exact_mean(group, bucket) if guard.given_up else compared(state, bucket)

        return watched


class _Guard:
    """Of one DDP object."""

    def __init__(self, plan: WatchPlan, group: dist.ProcessGroup, tell: Callable[[str], None]) -> None:
        self.comparison = Comparison(by_parameter=False, sampled=_SAMPLED if plan.steps > 1 else 0)
        self.given_up = False
        self._plan = plan
        self._group = group
        self._tell = tell
        self._reductions = 0
        self._next = plan.first
        self._compared = 0
        self._overflows = 0
        self._over = True

    def call(self, state: Any, bucket: GradBucket) -> None:
        """Before each call of the hook."""
        if self.given_up:
            return
        if is_capturing(bucket.buffer().device):  # a look waits for the device
            self.comparison.on = False
            return
        if self._over or bucket.index() == 0:
            self._reductions += 1
            self._reduction_begins(state)
        self._over = bucket.is_last()

    def _reduction_begins(self, state: Any) -> None:
        overflows = getattr(state, "overflows", 0)
        if overflows > self._overflows:  # the hook has mended it, at the cost of sending the bucket twice
            self._overflows = overflows
            self._give_up("gradients overflow float16")
        elif self.comparison.on:
            self._look()
        elif self._reductions >= self._next:
            self._next = self._reductions + self._plan.every
            self.comparison.on = True

    def _look(self) -> None:
        """The reduction before this one was compared."""
        self.comparison.step()
        self._compared += 1
        if self._compared < self._plan.steps:
            return
        self._compared, self.comparison.on = 0, False
        error = self.comparison.result(lambda identity: "", self._group)
        if error is None:
            return
        why = why_refused(self._plan.rung, error, {self._plan.rung: self._plan.limit})
        if why:
            self._give_up(why)

    def _give_up(self, why: str) -> None:
        self.given_up = True
        self._tell(f"back to exact gradients from reduction {self._reductions} on: {why}")
