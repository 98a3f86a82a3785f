"""Runs DDP's constructor again on the same object, which stays what the script holds.

construct_again(ddp, arguments)      # a new reducer, with these arguments
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.worker.ddp.arguments import CAN_LEAVE_SYNC_OUT
from autoddp.worker.ddp.private import (
    CARRIED_OVER,
    OF_THE_OLD_REDUCER,
    device_of,
    finalize_by_hand,
    finalizes_by_hand,
    without_first_sync,
)

construct = DDP.__init__
"""torch's own constructor, as it was before autoddp's stood in its place."""


def construct_again(ddp: DDP, arguments: dict[str, Any]) -> None:
    """Give the object a new reducer. All ranks must call this between the same two steps; nothing is sent."""
    before = dict(ddp.__dict__)
    module, by_hand = ddp.module, finalizes_by_hand(ddp)
    for name in OF_THE_OLD_REDUCER:
        before.pop(name, None)
        ddp.__dict__.pop(name, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the constructor's warnings were printed when the script called it
        with gradients_stay(module):
            _construct_alone(ddp, module, arguments)
    for name, value in before.items():
        if name in CARRIED_OVER or name not in ddp.__dict__:
            ddp.__dict__[name] = value
    if by_hand:
        finalize_by_hand(ddp)


@contextlib.contextmanager
def gradients_stay(module: nn.Module) -> Iterator[None]:
    """Keep DDP's constructor from replacing gradients by parts of its buckets: the script may hold them."""
    # By the method that DDP asks: a script's `parameters` may leave some out, or give groups for an optimizer.
    gradients = [(p, p.grad) for _, p in module.named_parameters()]
    for p, _ in gradients:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient


def attributes_made_of(arguments: dict[str, Any], like: DDP) -> dict[str, Any]:
    """The attributes of an object with these arguments; it has one parameter, on the device of `like`.

    Only DDP's constructor knows them for each version of torch. Without its first synchronisation it sends nothing, so
    one rank alone may call it.
    """
    module, made = nn.Module(), DDP.__new__(DDP)
    module.register_parameter("only", nn.Parameter(torch.zeros(1, device=device_of(like))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _construct_alone(made, module, arguments)
    return dict(made.__dict__)


def _construct_alone(ddp: DDP, module: nn.Module, arguments: dict[str, Any]) -> None:
    """Run DDP's constructor without its first synchronisation, so that nothing is sent."""
    if CAN_LEAVE_SYNC_OUT:
        return construct(ddp, module, **{**arguments, "init_sync": False})
    with without_first_sync():
        construct(ddp, module, **arguments)
