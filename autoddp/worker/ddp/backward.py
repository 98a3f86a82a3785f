"""Calls a function at a moment of a backward pass: at its begin, at a gradient, when all are computed, at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.hooks import RemovableHandle, unserializable_hook

from autoddp.worker.ddp.private import after_finalization, finalizes_by_hand, queue_callback, tensors_in


def when_backward_begins(
    output: Any, call: Callable[[], object], tensors: Callable[[Any], list[torch.Tensor]] = tensors_in
) -> bool:
    """Call `call` at each gradient of a tensor in `output`, which a module has returned; `tensors` finds them.

    Returns whether there is such a tensor. A script may save it: without the mark torch would warn that this hook is
    not saved with it.

    A parameter that a module returns beside its output is none: it outlives the pass, and would keep the hooks of all.
    """

    def begins(_gradient: torch.Tensor) -> None:
        call()

    unserializable_hook(begins)
    with torch._C.DisableTorchFunction():  # a class or a mode of the script's is not asked
        found = [tensor for tensor in tensors(output) if tensor.requires_grad and not tensor.is_leaf]
        for tensor in found:
            tensor.register_hook(begins)
    return bool(found)


def when_gradients_come(parameters: Iterable[torch.Tensor], call: Callable[[], object]) -> list[RemovableHandle]:
    """Call `call` at the gradient of each of these parameters, until the handles are removed."""

    def comes(_gradient: torch.Tensor) -> None:
        call()

    unserializable_hook(comes)
    return [parameter.register_hook(comes) for parameter in parameters if parameter.requires_grad]


def after_backward_computed(call: Callable[[], None]) -> None:
    """Call `call` when the current backward pass has computed all gradients; DDP waits for its reductions after that.

    It must be called before the last gradient is ready, because DDP queues its waiting then.
    """
    queue_callback(call)


def after_this_backward(call: Callable[[], None]) -> None:
    """Call `call` when the current backward pass has ended, and with it DDP's reduction (but see `after_reduction`)."""

    def then() -> None:
        queue_callback(call)  # runs after the callbacks that DDP has queued until then

    queue_callback(then)


def after_reduction(ddp: DDP, reduces: bool, call: Callable[[], None]) -> None:
    """Call `call` when the gradients of the current backward pass are in their places, reduced if it `reduces`.

    Where the script finalizes its passes itself, that is after the pass.
    """
    if reduces and finalizes_by_hand(ddp):
        after_finalization(ddp, call)
    else:
        after_this_backward(call)
