"""Watches a near or lossy hook in the real job, and goes back to exact gradients where it is no longer good enough.

Every so many reductions the gradients of a few also travel whole and the two are compared. All ranks decide together,
by one small all-reduce of the norms, and change hooks at the same reduction. Of a bucket's exact mean only the norms
outlive its reduction, so a look takes no memory when the next forward pass needs it.
"""

# DDP reads a hook's annotations and wants its own types there: no `from __future__ import annotations`.
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from autoddp.knobs import refused_for_one_parameter, why_refused
from autoddp.wire import WatchPlan
from autoddp.worker.ddp.model import Model
from autoddp.worker.gradients.comparison import SAMPLED, Comparison
from autoddp.worker.hooks import Hook
from autoddp.worker.hooks.bucket import GradBucket
from autoddp.worker.hooks.exact import exact_mean
from autoddp.worker.process.device import is_capturing

_SURE = 4  # reductions compared before a hook is given up for the error of a single parameter


class Watch:
    """`around` is what `wrapped.Around` asks for; `tell` hears once, on every rank, why the hook was given up.

    What is found of a model's gradients holds for every later DDP object of the same parameters: `worker.ddp.model`.
    """

    def __init__(self, plan: WatchPlan, tell: Callable[[str], None]) -> None:
        self._plan = plan
        self._tell = tell
        self._schedules: dict[str, _Schedule] = {}
        """Description of a model → that of the DDP object that was built last."""
        self._given_up: set[str] = set()
        """Descriptions of models for which the hook is not good enough."""

    def around(self, hook: Hook, group: dist.ProcessGroup, model: Model) -> Hook:
        """The hook, as long as it is good enough; then the exact mean."""
        guard = self._guard(model)
        compared = guard.comparison.around(hook, group)

        def watched(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            guard.call(state, bucket, group)
            return exact_mean(group, bucket) if guard.given_up else compared(state, bucket)

        return watched

    def _guard(self, model: Model) -> "_Guard":
        latest, given_up = model.keep(_Latest), model.description in self._given_up
        before = latest.guard
        if before is None:
            # A model with new weights begins its training now: the first look comes as soon as it would in another job.
            last = self._schedules.get(model.description, _Schedule(self._plan.first))
            schedule = _Schedule(min(last.next, last.reductions + self._plan.first), last.reductions)
        else:
            schedule = replace(before.schedule)
        self._schedules[model.description] = schedule
        tell = functools.partial(self._give_up, model.description)
        latest.guard = guard = _Guard(self._plan, schedule, given_up, model.name, tell)
        if before is not None:
            guard.go_on_from(before)
        return guard

    def _give_up(self, description: str, why: str) -> None:
        # Objects that exist already decide for themselves: which of them reduces first may differ between ranks.
        is_new = description not in self._given_up
        self._given_up.add(description)
        if is_new:
            self._tell(why)


@dataclass
class _Schedule:
    """When the monitor compares the hook with the exact mean."""

    next: int
    """The reduction at which to look next."""
    reductions: int = 0
    """Reductions so far, of this DDP object and those before it."""


@dataclass
class _Look:
    """One comparison of the hook with the exact mean."""

    wanted: int
    """Reductions to compare."""
    compared: int = 0


@dataclass
class _Latest:
    """What `Watch` keeps of a model."""

    guard: "_Guard | None" = None


class _Guard:
    """Watches the hook of one DDP object. It does not hold the process group, and may outlive the object."""

    def __init__(
        self,
        plan: WatchPlan,
        schedule: _Schedule,
        given_up: bool,
        name: Callable[[int], str],
        tell: Callable[[str], None],
    ) -> None:
        """`name` gives a parameter's name, by its identity."""
        self.comparison = Comparison(sampled=SAMPLED if plan.steps > 1 else 0)
        self.given_up = given_up
        self._plan = plan
        self.schedule = schedule
        self._name = name
        self._tell = tell
        self.look = _Look(plan.steps)
        self._overflows = 0
        self._over = True

    def go_on_from(self, other: "_Guard") -> None:
        """Finish the look that `other` has begun, the guard of an earlier object of the same tensors."""
        self.comparison.go_on_from(other.comparison)
        self.look, other.look = other.look, _Look(self._plan.steps)

    def call(self, state: Any, bucket: GradBucket, group: dist.ProcessGroup) -> None:
        """Called before each call of the hook."""
        if self.given_up:
            return
        if is_capturing(bucket.buffer().device):  # a look waits for the device
            self.comparison.on = False
            return
        if self._over or bucket.index() == 0:
            self.schedule.reductions += 1
            self._reduction_begins(state, group)
        self._over = bucket.is_last()

    def _reduction_begins(self, state: Any, group: dist.ProcessGroup) -> None:
        overflows = getattr(state, "overflows", 0)
        if overflows > self._overflows:  # the hook has mended it, at the cost of sending the bucket twice
            self._overflows = overflows
            self._give_up("gradients overflow float16")
        elif self.comparison.on:
            self._has_compared(group)
        elif self.schedule.reductions >= self.schedule.next:
            self.schedule.next = self.schedule.reductions + self._plan.every
            self.comparison.on = True

    def _has_compared(self, group: dist.ProcessGroup) -> None:
        """The reduction before this one was compared."""
        self.comparison.step()
        self.look.compared += 1
        if self.look.compared < self.look.wanted:
            return
        error = self.comparison.result(self._name, group)
        looked, self.look = self.look.compared, _Look(self._plan.steps)
        rung, limits = self._plan.rung, {self._plan.rung: self._plan.limit}
        if error is not None and looked < _SURE and refused_for_one_parameter(rung, error, limits):
            self.look = _Look(_SURE)
            return
        self.comparison.on = False
        why = "" if error is None else why_refused(rung, error, limits)
        if why:
            self._give_up(why)

    def _give_up(self, why: str) -> None:
        self.given_up = True
        self.comparison.on = False
        self._tell(f"back to exact gradients from reduction {self.schedule.reductions} on: {why}")
