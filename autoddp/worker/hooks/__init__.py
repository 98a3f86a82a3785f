"""Communication hooks of our own: the same mathematics as torch's, on every backend and with any number of buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from autoddp.knobs import Configuration
from autoddp.knobs.hook import DEFAULT_START_STEP
from autoddp.worker.hooks.bucket import GradBucket
from autoddp.worker.hooks.powersgd import PowerSGDState, powersgd_hook
from autoddp.worker.hooks.sixteen_bit import SixteenBitState, sixteen_bit_hook

Hook = Callable[[Any, GradBucket], "torch.futures.Future[torch.Tensor]"]


def hook_for(
    configuration: Configuration, group: dist.ProcessGroup, start_step: int | None = None
) -> tuple[Any, Hook] | None:
    """State and hook for a configuration, or None where it keeps the script's own.

    `start_step` overrides the configuration's: a trial measures compression from its first step.
    """
    name = configuration.get("hook")
    if name == "powersgd":
        start = configuration.get("powersgd_start_step", DEFAULT_START_STEP) if start_step is None else start_step
        state = PowerSGDState(
            group,
            rank=int(str(configuration["powersgd_rank"])),
            start_step=int(str(start)),
            batched=bool(configuration.get("powersgd_batched", False)),
            wire_type=torch.bfloat16 if configuration.get("powersgd_factors") == "bf16" else None,
        )
        return state, powersgd_hook
    if name in ("fp16", "bf16"):
        dtype = torch.float16 if name == "fp16" else torch.bfloat16
        return SixteenBitState(group, dtype), sixteen_bit_hook
    return None
