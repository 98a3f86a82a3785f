"""What torch.cuda.make_graphed_callables gives, without a GPU: the same contract, and the same dangers.

Each callable gets one set of buffers for its inputs, outputs and gradients, which every call overwrites; outputs and
gradients that are handed out lie in them. Only inputs may change between calls: the arithmetic itself is run again.

Callables that are made together share their memory, which is used again as soon as the order of the capture allows it:
all forward, then all backward in the reverse order. So whatever a callable runs, forward or backward, spoils what its
own backward pass and those of later ones read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

ON_THE_DEFAULT_STREAM = {"stream": "default"}
"""What a test writes into `node_of(parameter).metadata` where the parameter's node was made before the capture."""


def node_of(leaf: torch.Tensor) -> Any:
    """The node of autograd that adds to a leaf's gradient; another one once nobody holds the first."""
    made_of_it = leaf.view_as(leaf).grad_fn
    assert made_of_it is not None
    return made_of_it.next_functions[0][0]


def static_callables(
    callables: tuple[Any, ...], sample_args: tuple[tuple[torch.Tensor, ...], ...], num_warmup_iters: int = 3
) -> Any:
    for call, sample in zip(callables, sample_args, strict=True):
        for _ in range(num_warmup_iters):  # moves whatever a forward pass moves
            call(*sample)
    spoilt = [True] * len(callables)
    """Whether what the backward pass of each reads was overwritten since its forward pass."""
    pairs = zip(callables, sample_args, strict=True)
    return tuple(_static(call, sample, spoilt, place) for place, (call, sample) in enumerate(pairs))


def _static(function: Any, sample: tuple[torch.Tensor, ...], spoilt: list[bool], place: int) -> Any:
    parameters = tuple(function.parameters()) if isinstance(function, nn.Module) else ()
    surface = (*sample, *parameters)
    forward = function.forward if isinstance(function, nn.Module) else function
    for leaf in surface:
        if leaf.requires_grad and node_of(leaf).metadata == ON_THE_DEFAULT_STREAM:
            raise RuntimeError("autograd refuses a leaf whose node was made on the default stream")
    wanted = [tensor for tensor in surface if tensor.requires_grad]
    kept: dict[str, Any] = {"outputs": None, "gradients": None}

    class Static(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: torch.Tensor) -> Any:
            for own, other in zip(sample, given, strict=False):
                if own.data_ptr() != other.data_ptr():
                    own.data.copy_(other)
            spoilt[place:] = [True] * len(spoilt[place:])
            spoilt[place] = False
            # A capture keeps the types of its first autocast.
            with torch.enable_grad(), kept.setdefault("autocast", _Autocast(sample[0].device.type)):
                kept["live"] = forward(*sample)
            fresh = [output.detach() for output in _flat(kept["live"])]
            if kept["outputs"] is None:
                kept["outputs"] = [output.clone() for output in fresh]
            for own, output in zip(kept["outputs"], fresh, strict=True):
                own.copy_(output)
            return tuple(own.detach() for own in kept["outputs"])

        @staticmethod
        def backward(ctx: Any, *sent: torch.Tensor) -> Any:
            # Whatever was put into the buffers last is what a replay would see.
            found = torch.autograd.grad(_flat(kept["live"]), wanted, sent, retain_graph=True)
            if spoilt[place]:
                found = tuple(torch.full_like(gradient, 7.0) for gradient in found)
            spoilt[place:] = [True] * len(spoilt[place:])
            if kept["gradients"] is None:
                kept["gradients"] = [gradient.clone() for gradient in found]
            for own, gradient in zip(kept["gradients"], found, strict=True):
                own.copy_(gradient)
            given = iter(kept["gradients"])
            return tuple(next(given).detach() if tensor.requires_grad else None for tensor in surface)

    def call(*given: torch.Tensor) -> Any:
        outputs = Static.apply(*given, *parameters)
        return pytree.tree_unflatten(list(outputs), pytree.tree_flatten(kept["live"])[1])

    return call


class _Autocast:
    """Enters, each time, the autocast that held when this was made."""

    def __init__(self, device: str) -> None:
        self._device, self._on, self._type = device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    def __enter__(self) -> None:
        self._now = torch.autocast(self._device, dtype=self._type, enabled=self._on, cache_enabled=False)
        self._now.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._now.__exit__(*error)


def _flat(returned: Any) -> list[torch.Tensor]:
    return pytree.tree_leaves(returned)
