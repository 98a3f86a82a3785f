"""Puts the reductions of a step's micro-steps off to the last one, in scripts that accumulate without `no_sync`.

Reducing after each backward pass gives mean(g1) + mean(g2) + …, reducing once gives mean(g1 + g2 + …): the same. A step
that comes earlier than learned finds gradients that were never reduced; then they are, before anything reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autoddp.worker.ddp import Wrapped, is_joining
from autoddp.worker.reduction import ReductionSwitch

_CHUNK = 25 * 2**20  # bytes that are flattened at once
_CLIPPERS = ("clip_grad_norm_", "clip_grad_value_", "get_total_norm", "clip_grads_with_norm_")


class Deferral:
    """`install()` once, tell it of each forward pass, and set `every`: micro-steps per step, 1 puts nothing off."""

    def __init__(self, switch: ReductionSwitch, wrapped: Callable[[], Sequence[Wrapped]]) -> None:
        self._switch = switch
        self._wrapped = wrapped
        self._every = 1
        self._forwards = 0
        self._pending = False
        self.steps_by_closure = False
        """Whether an optimizer of DDP's parameters runs backward itself: it may read gradients after each."""

    @property
    def every(self) -> int:
        """Micro-steps per step, of which only the last reduces."""
        return self._every

    @every.setter
    def every(self, micro_steps: int) -> None:
        """At a step boundary."""
        self._every, self._forwards, self._pending, self._switch.put_off = micro_steps, 0, False, False

    def install(self) -> None:
        """Stand in front of whatever reads gradients. The script has bound none of these names yet."""
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        for name in _CLIPPERS:
            for place in (clip_grad, torch.nn.utils):
                if hasattr(place, name):
                    setattr(place, name, self._reading(getattr(place, name)))
        scaler = torch.amp.GradScaler
        scaler.unscale_ = self._reading(scaler.unscale_)  # type: ignore[method-assign]

    def forward_begins(self, ddp: DDP) -> None:
        """A forward pass is about to run; what is decided here holds for its backward pass."""
        self._switch.put_off = False
        if self._every < 2 or not (torch.is_grad_enabled() and self._switch.reduces(ddp)) or is_joining(ddp):
            return
        self._forwards += 1
        # Buffers are synchronised before each forward, as they are where every backward reduces.
        ddp.require_forward_param_sync = True
        self._pending = self._switch.put_off = self._forwards % self._every != 0

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_ours(optimizer):
            return
        if any(callable(value) for value in (*args[1:], *kwargs.values())):
            self.steps_by_closure = True
            self.every = 1
        self.reduce_what_is_missing()

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._is_ours(optimizer):
            self._forwards = 0

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        ours = {id(p) for wrapped in self._wrapped() for p in wrapped.parameters}
        return any(id(p) in ours for group in optimizer.param_groups for p in group["params"])

    def _reading(self, reader: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(reader)
        def read(*args: Any, **kwargs: Any) -> Any:
            self.reduce_what_is_missing()
            return reader(*args, **kwargs)

        return read

    def reduce_what_is_missing(self) -> None:
        """The mean over the ranks of all gradients, where a backward pass has put it off.

        Right whatever part of a gradient was reduced before: the mean of equal parts is that part.
        """
        if not self._pending:
            return
        self._pending, self._forwards = False, 0
        for wrapped in self._wrapped():
            ddp = wrapped.ddp
            gradients = [p.grad for p in wrapped.parameters if p.grad is not None]
            if ddp is not None:
                for some in _chunks(gradients):
                    _average(some, ddp.process_group)


def _chunks(gradients: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """In order, of one type and device each, small enough to be copied."""
    found: list[list[torch.Tensor]] = []
    room = 0
    for gradient in gradients:
        size = gradient.numel() * gradient.element_size()
        alike = found and (found[-1][0].dtype, found[-1][0].device) == (gradient.dtype, gradient.device)
        if not alike or size > room:
            found.append([])
            room = _CHUNK
        found[-1].append(gradient)
        room -= size
    return found


def _average(gradients: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).div_(group.size())
    dist.all_reduce(flat, group=group)
    offset = 0
    for gradient in gradients:
        gradient.copy_(flat[offset : offset + gradient.numel()].view(gradient.shape))
        offset += gradient.numel()
