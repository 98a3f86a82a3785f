"""Makes several steps of a training one, in the way in which a user writes that loop. It has no part of autoddp.

Each loss is divided by the number of steps; all but the last step run under `no_sync`, and there the script neither
clips nor unscales nor steps; `zero_grad` waits for the next update.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Loop:
    """`number` steps of the script are one, until the script has made `until` steps; one by one after that.

    `broadcasts`: each pass broadcasts buffers, as DDP does where it reduces. Behind `no_sync` the next one does not.
    `learns`: the first pass of each model reduces, in which DDP learns a static graph.
    """

    def __init__(self, number: int, until: int | None, broadcasts: bool, learns: bool) -> None:
        self._at_once, self._until, self._broadcasts, self._learns = number, until, broadcasts, learns
        self._trained: weakref.WeakSet[DDP] = weakref.WeakSet()
        self._steps = self._kept = self._depth = 0
        self._has_updated = True

    @property
    def _number(self) -> int:
        return 1 if self._until is not None and self._steps >= self._until else self._at_once

    def _updates(self) -> bool:
        return self._kept == self._number - 1

    def install(self) -> None:
        """Patch what the training calls."""
        self._around(torch.Tensor, "backward", lambda backward, one, *a, **k: backward(one / self._number, *a, **k))
        self._around(DDP, "forward", self._forward)
        self._around(torch.optim.Optimizer, "__init__", self._made)
        for owner in (torch.optim.Optimizer, nn.Module):
            self._around(owner, "zero_grad", lambda clear, *a, **k: None if self._kept else clear(*a, **k))
        for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
            self._around(nn.utils, name, lambda clip, *a, **k: clip(*a, **k) if self._updates() else None)
        scaler = torch.amp.GradScaler
        self._around(scaler, "unscale_", lambda unscale, *a: unscale(*a) if self._updates() else None)
        self._around(scaler, "step", lambda step, me, of: step(me, of) if self._updates() else of.step())
        self._around(scaler, "update", lambda update, *a: update(*a) if self._has_updated else None)

    @staticmethod
    def _around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        setattr(owner, name, patched)

    def _forward(self, forward: Callable[..., Any], ddp: DDP, *args: Any, **kwargs: Any) -> Any:
        if self._broadcasts:
            ddp.require_forward_param_sync = True
        first = torch.is_grad_enabled() and ddp not in self._trained
        if first:
            self._trained.add(ddp)
        with contextlib.nullcontext() if self._updates() or (first and self._learns) else ddp.no_sync():
            return forward(ddp, *args, **kwargs)

    def _made(self, make: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        make(optimizer, *args, **kwargs)
        optimizer.step = functools.partial(self._step, optimizer.step)

    def _step(self, step: Callable[..., Any], *args: Any) -> None:
        if self._depth:  # an optimizer inside another one
            return step(*args)
        self._has_updated = self._updates()
        if self._has_updated:
            self._depth += 1
            step(*args)
            self._depth -= 1
        self._kept = 0 if self._has_updated else self._kept + 1
        self._steps += 1
