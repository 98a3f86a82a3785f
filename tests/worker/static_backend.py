"""A backend of torch.compile that has what is dangerous about its CUDA graphs: one set of buffers for what it returns.

Like torch's own it asks, while it compiles, whether what it makes is to be replayed; no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

Compiled = Callable[..., Any]


class StaticBackend:
    """`torch.compile(model, backend=StaticBackend())`. `compiled` lists, for each graph, whether it is replayed."""

    def __init__(self, wrong_by: float = 0.0) -> None:
        self.compiled: list[bool] = []
        self.sizes: list[int] = []
        """Parameters and inputs of each forward graph."""
        self._wrong_by = wrong_by
        self._backend = aot_autograd(fw_compiler=self._forward, bw_compiler=self._backward)

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        compiled: Compiled = self._backend(graph, inputs)
        return compiled

    def _forward(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        self.compiled.append(bool(torch._inductor.config.triton.cudagraphs))
        self.sizes.append(len(inputs))
        return self._replayed(graph, self.compiled[-1])

    def _backward(self, graph: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Compiled:
        return self._replayed(graph, self.compiled[-1])

    def _replayed(self, graph: torch.fx.GraphModule, replayed: bool) -> Compiled:
        buffers: list[Any] = []

        def call(*inputs: Any) -> list[Any]:
            returned = graph(*inputs)
            if not replayed:
                return list(returned)
            if not buffers:
                buffers.extend(one.clone() if isinstance(one, torch.Tensor) else one for one in returned)
            for buffer, one in zip(buffers, returned, strict=True):
                if isinstance(one, torch.Tensor):
                    buffer.copy_(one * (1 + self._wrong_by) if one.is_floating_point() else one)
            return [b.view_as(b) if isinstance(b, torch.Tensor) else b for b in buffers]

        return make_boxed_func(call)
