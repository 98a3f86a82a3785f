"""autoddp's communication hooks: same mathematics as torch's hooks, on every backend, with any number of buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from autoddp.knobs import Configuration
from autoddp.knobs.hook import HOOK
from autoddp.worker.ddp.model import Model
from autoddp.worker.hooks.bucket import GradBucket
from autoddp.worker.hooks.powersgd import Memory, PowerSGDState, powersgd
from autoddp.worker.hooks.sixteen_bit import bf16, fp16

Hook = Callable[[Any, GradBucket], "torch.futures.Future[torch.Tensor]"]
Make = Callable[[Configuration, dist.ProcessGroup, "int | None"], "tuple[Any, Hook]"]
"""Makes state and hook for a configuration and a group. The third argument, if not None, overrides the start step.

The hook sends by `state.all_reduce`, which is replaced where only its computing is measured; see `by_itself`.
"""

_MAKE: dict[str, Make] = {"fp16": fp16, "bf16": bf16, "powersgd": powersgd}
"""Name of the hook in `knobs.hook.HOOKS` → the function that makes it."""


def hook_for(
    configuration: Configuration, group: dist.ProcessGroup, start_step: int | None = None, model: Model | None = None
) -> tuple[Any, Hook] | None:
    """State and hook for a configuration; None if it has no hook.

    `start_step` overrides that of the configuration, because a trial measures compression from its first step; all
    trials begin alike. Without it the hook goes on with what it has kept of `model`, if that is given.
    """
    name = HOOK.of(configuration)
    if not name:
        return None
    state, hook = _MAKE[name](configuration, group, start_step)
    if isinstance(state, PowerSGDState) and model is not None and start_step is None:
        state.go_on_with(model.keep(Memory))
    return state, hook
