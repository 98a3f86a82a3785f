"""Sees the script's own collectives, such as a barrier or the mean of its losses: in them a rank waits for the others.

    Collectives(begins=lambda: "other", ends=lambda stage: None).install()

The functions of torch.distributed are patched in place when torch is imported, so the patch also reaches a script that
imports them by name. What DDP reduces never comes this way. Where the script goes on meanwhile (`async_op`), its wait
for the result counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from autoddp.worker.observe.training_thread import TrainingThread

_NAMES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
)


class Collectives:
    """`begins()` gives what `ends` is called with. Only the thread that has installed this calls them."""

    def __init__(self, begins: Callable[[], str], ends: Callable[[str], None]) -> None:
        self._begins, self._ends = begins, ends
        self._trains = TrainingThread()
        self._inside = False

    def install(self) -> None:
        """Patch the functions, under both names that they have."""
        for name in _NAMES:
            function = getattr(dist.distributed_c10d, name, None)
            if function is not None:
                patched = self._wrapped(function)
                setattr(dist.distributed_c10d, name, patched)
                setattr(dist, name, patched)
        dist.Work.wait = self._wrapped(dist.Work.wait)  # type: ignore[method-assign]

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def patched(*args: Any, **kwargs: Any) -> Any:
            # torch.compile puts another function of its own in the place of torch's, not in that of this one.
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            # The functions for objects call those for tensors: the outer call alone counts.
            if self._inside or kwargs.get("async_op") or not self._trains:
                return function(*args, **kwargs)
            self._inside = True
            before = self._begins()
            try:
                return function(*args, **kwargs)
            finally:
                self._ends(before)
                self._inside = False

        return patched
