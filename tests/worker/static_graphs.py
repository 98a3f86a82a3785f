"""What torch.cuda.make_graphed_callables gives, without a GPU: the same contract, and the same dangers.

Each callable gets one set of buffers for its inputs, outputs and gradients, which every call overwrites; outputs and
gradients that are handed out lie in them. Only inputs may change between calls: the arithmetic itself is run again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


def static_callables(callables: tuple[nn.Module, ...], sample_args: tuple[tuple[torch.Tensor, ...], ...]) -> Any:
    for module in callables:
        assert not any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks))
    for module, sample in zip(callables, sample_args, strict=True):
        _warm_up(module, sample)
    graphed = [_static(module, sample) for module, sample in zip(callables, sample_args, strict=True)]
    for module, call in zip(callables, graphed, strict=True):
        module.forward = call
    return tuple(callables)


def _warm_up(module: nn.Module, sample: tuple[torch.Tensor, ...]) -> None:
    """As there: three passes, which move whatever a forward pass moves."""
    for _ in range(3):
        module(*sample)


def _static(module: nn.Module, sample: tuple[torch.Tensor, ...]) -> Any:
    parameters = tuple(module.parameters())
    surface = (*sample, *parameters)
    forward = module.forward
    wanted = [tensor for tensor in surface if tensor.requires_grad]
    kept: dict[str, Any] = {"outputs": None, "gradients": None}

    class Static(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: torch.Tensor) -> Any:
            for own, other in zip(sample, given, strict=False):
                if own.data_ptr() != other.data_ptr():
                    own.data.copy_(other)
            with torch.enable_grad():
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


def _flat(returned: Any) -> list[torch.Tensor]:
    return pytree.tree_leaves(returned)
