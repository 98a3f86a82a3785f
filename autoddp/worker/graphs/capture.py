"""Captures modules as graphs and proves each by one pass forward and backward before it may be used."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoddp.worker.device import as_current, devices_of, seed, synchronize
from autoddp.worker.graphs.signature import Signature, tensors_of

Graphed = Callable[..., Any]
"""Of tensors; one of what `torch.cuda.make_graphed_callables` returns."""

Make = Callable[..., Any]
"""As `torch.cuda.make_graphed_callables`."""

_WATCHDOG = 0.5  # seconds
_FULL, _SIXTEEN_BIT = 1e-3, 2e-2
"""The largest relative L2 difference to the same pass without a graph: libraries may choose other kernels."""


@dataclass(frozen=True)
class Sample:
    """How a module is called in each step."""

    model: nn.Module
    """What DDP wraps: the module itself, or that of which it is a block."""
    module: nn.Module
    signature: Signature
    tensors: Sequence[torch.Tensor]
    """Of the last call, or of their like."""
    autocast: torch.dtype | None
    """Under autocast, its type."""

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        return next(self.module.parameters()).device

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Tensors to call it with, of nobody else's."""
        return tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in self.tensors)


class _ByPosition(nn.Module):
    """The module as a graph wants it: a function of tensors alone, with no hooks and nobody's stand-in."""

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.module = sample.module
        self.training = sample.module.training
        self._signature = sample.signature

    def forward(self, *tensors: torch.Tensor) -> Any:
        args, kwargs = self._signature.arguments(tensors)
        return type(self.module).forward(self.module, *args, **kwargs)


def capture(samples: Sequence[Sample], make: Make) -> list[Graphed]:
    """One graph for each module, in the order in which a step calls them. Buffers and random numbers stay as they were.

    Raises RuntimeError where a module cannot be captured, or its graph does not give what the module gives.
    """
    modules = [_ByPosition(sample) for sample in samples]
    inputs = [sample.inputs() for sample in samples]
    device = _one_device(samples)
    # torch captures on the current device.
    with as_current(device), no_trace(samples), under_autocast(samples[0]), torch.enable_grad():
        expected = [one_pass(module, given, module) for module, given in zip(modules, inputs, strict=True)]
        _let_others_finish(device)
        # A module's `forward` becomes the graph: so it is the function, not the module, that gets replaced.
        graphed = list(make(tuple(modules), tuple(inputs)))
        for sample, module, given, call, what in zip(samples, modules, inputs, graphed, expected, strict=True):
            prove(sample, one_pass(call, given, module), what)
    return [call.forward if isinstance(call, nn.Module) else call for call in graphed]


def _one_device(samples: Sequence[Sample]) -> torch.device:
    device, *others = devices_of(
        tensor for sample in samples for tensor in (*sample.module.parameters(), *sample.tensors)
    )
    if others:
        raise RuntimeError(f"what is to be captured is on several devices: {device}, {', '.join(map(str, others))}")
    return device


def _let_others_finish(device: torch.device) -> None:
    """NCCL's watchdog asks every 0.1 s for the end of collectives until it has seen it, which would break a capture."""
    if device.type == "cuda":
        synchronize(device)
        time.sleep(_WATCHDOG)


def one_pass(call: Callable[..., Any], inputs: Sequence[torch.Tensor], module: nn.Module) -> list[torch.Tensor]:
    """Outputs and gradients, copied, under random numbers that are the same each time."""
    device = next(module.parameters()).device
    seed(device, 0)
    outputs, _ = tensors_of(call(*inputs))
    found = [output.detach().clone() for output in outputs]
    differentiable = [output for output in outputs if output.requires_grad]
    wanted = [tensor for tensor in (*inputs, *module.parameters()) if tensor.requires_grad]
    if differentiable and wanted:
        seed(device, 1)  # whatever the forward pass has drawn
        sent = [torch.randn_like(output) for output in differentiable]
        gradients = torch.autograd.grad(differentiable, wanted, sent, allow_unused=True)
        found += [gradient.detach().clone() for gradient in gradients if gradient is not None]
    return found


def prove(sample: Sample, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Both as `one_pass` gives them. RuntimeError unless the graph's are the module's."""
    narrow = sample.autocast is not None or any(t.dtype in (torch.float16, torch.bfloat16) for t in expected)
    if len(found) != len(expected):
        raise RuntimeError(f"the graph of {type(sample.module).__name__} gives other gradients than the module")
    for one, other in zip(found, expected, strict=True):
        difference = float((one.double() - other.double()).norm())
        if not difference <= (_SIXTEEN_BIT if narrow else _FULL) * float(other.double().norm()):
            raise RuntimeError(f"the graph of {type(sample.module).__name__} does not give what the module gives")


@contextlib.contextmanager
def no_trace(samples: Sequence[Sample]) -> Iterator[None]:
    """Warm-up passes move BatchNorm's statistics and draw random numbers."""
    buffers = [buffer for sample in samples for buffer in sample.module.buffers()]
    before = [buffer.clone() for buffer in buffers]
    devices = {t.device for sample in samples for t in (*sample.module.parameters(), *buffers) if t.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)


def under_autocast(sample: Sample, cached: bool = False) -> contextlib.AbstractContextManager[Any]:
    """As the script calls the module. Without the cache, so that a graph does not hold weights cast once for all."""
    return torch.autocast(
        sample.device.type, dtype=sample.autocast, enabled=sample.autocast is not None, cache_enabled=cached
    )
