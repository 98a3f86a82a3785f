"""The arguments of DDP's constructor: what the script passed, what a configuration sets, what forbids any change."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import KNOBS, Configuration, Reach
from autoddp.knobs.ddp_arguments import (
    BROADCAST_BUFFERS,
    BUCKET_CAP_MB,
    BUCKET_CAP_MB_LIST,
    FIND_UNUSED,
    GRADIENT_AS_BUCKET_VIEW,
    STATIC_GRAPH,
)
from autoddp.worker.ddp.private import root_of, steps_inside_backward

_signature = inspect.signature(DDP.__init__)
CAN_LEAVE_SYNC_OUT = "init_sync" in _signature.parameters
"""Whether the constructor can be told to send nothing; torch 2.6 cannot."""


def _tells_who_holds_gradients() -> bool:
    """Whether torch's own hold on a `.grad` counts among the references of Python's object.

    In torch 2.6 it counts only at times, so `views` cannot see there whether the script holds a gradient.
    """
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    gradients = [parameter.grad]
    in_use = sys.getrefcount(gradients[0])
    parameter.grad = None
    return in_use > sys.getrefcount(gradients[0])


AVAILABLE_ARGUMENTS = frozenset(knob.name for knob in KNOBS if knob.reach is Reach.DDP) & set(_signature.parameters)
if not _tells_who_holds_gradients():
    AVAILABLE_ARGUMENTS -= {GRADIENT_AS_BUCKET_VIEW.name}
"""The arguments of DDP's constructor that are knobs, in the installed torch."""


def bind(ddp: DDP, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of this call of the constructor by name, `self` among them; None where it is no valid call."""
    try:
        return dict(_signature.bind(ddp, *args, **kwargs).arguments)
    except TypeError:
        return None


def without_self(given: dict[str, Any]) -> dict[str, Any]:
    """All but the object itself."""
    return {name: value for name, value in given.items() if name != "self"}


def as_arguments(configuration: Configuration) -> dict[str, Any]:
    """The arguments that `configuration` sets, with those that must change along with them."""
    given = {name: value for name, value in configuration.ddp_arguments.items() if name != BROADCAST_BUFFERS.name}
    if STATIC_GRAPH.of(configuration):
        # A static graph ends the search for unused parameters; DDP would warn, and join() still take part in a search.
        given[FIND_UNUSED] = False
    plan, by_list = BUCKET_CAP_MB_LIST.of(configuration), BUCKET_CAP_MB_LIST.name
    if plan:
        return given | {by_list: list(plan)}
    # DDP would prefer a list that the script wrote to our cap.
    return given | ({by_list: None} if BUCKET_CAP_MB.name in given and by_list in AVAILABLE_ARGUMENTS else {})


def why_untouchable(arguments: dict[str, Any], module: nn.Module) -> str:
    """Why an object must not be changed: in these cases DDP uses a hook of its own or depends on other arguments."""
    if arguments.get("mixed_precision") is not None:
        return "DDP's own mixed_precision is on"
    if arguments.get("delay_all_reduce_named_params") is not None:
        return "delay_all_reduce_named_params is used"
    mesh = arguments.get("device_mesh")
    if mesh is not None and root_of(mesh) != mesh:
        return "its device_mesh is part of a larger one: the rest of it may split the parameters"
    if steps_inside_backward(module):
        return "the optimizer runs inside backward"
    return ""
