"""Captures modules as graphs and proves each by one pass forward and backward before it may be used."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoddp.worker.graphs.safe_capture import safe_captures
from autoddp.worker.graphs.signature import CONSTANTS, OF_EVERY_MODULE, Signature, settings_of, tensors_of
from autoddp.worker.process.device import as_current, on_a_side_stream, seed

Graphed = Callable[..., Any]
"""A function of tensors: one of what `torch.cuda.make_graphed_callables` returns."""

Make = Callable[..., Any]
"""A function like `torch.cuda.make_graphed_callables`."""

_PASSES = 3  # before a capture: libraries choose their kernels and take their memory in the first
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
    """Values of the last call's tensors, in the host's memory: on the device they would be kept activations."""
    autocast: torch.dtype | None
    """The type of the script's autocast; None without it."""

    @property
    def device(self) -> torch.device:
        """The module's device."""
        return next(self.module.named_parameters())[1].device

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Fresh copies of the inputs, not aliased with the script's tensors."""
        likes = self.signature.tensors
        return tuple(
            value.to(like.device, copy=True).requires_grad_(like.requires_grad)
            for value, like in zip(self.tensors, likes, strict=True)
        )


class _ByPosition(nn.Module):
    """The module as a function of tensors alone, without its own hooks and without a stand-in for its `forward`."""

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.module = sample.module
        self.training = sample.module.training
        self._signature = sample.signature

    def forward(self, *tensors: torch.Tensor) -> Any:
        args, kwargs = self._signature.arguments(tensors)
        return type(self.module).forward(self.module, *args, **kwargs)


class _Aliased:
    """The module as a function of the inputs and of aliases of all parameters, which are other leaves of autograd.

    autograd runs each leaf's node on the stream on which it was made, and DDP's reducer, or a loss that the script
    still holds, keeps the parameters' nodes of the default stream alive. A capture may not wait for that stream: torch
    2.13 refuses it, and before the driver did. The aliases share the parameters' memory and have nodes of their own,
    made by the capture itself.
    """

    def __init__(self, by_position: _ByPosition) -> None:
        self._by_position = by_position
        self._names = [name for name, _ in by_position.named_parameters()]
        self.parameters = [parameter for _, parameter in by_position.named_parameters()]

    def aliases(self) -> tuple[torch.Tensor, ...]:
        return tuple(p.detach().requires_grad_(p.requires_grad) for p in self.parameters)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        inputs = len(tensors) - len(self._names)
        given = dict(zip(self._names, tensors[inputs:], strict=True))
        return torch.func.functional_call(self._by_position, given, tensors[:inputs])

    def graphed(self, call: Graphed) -> Graphed:
        """The graph as a function of the inputs, whose gradients reach the parameters themselves."""
        return lambda *inputs: call(*inputs, *self.parameters)


def capture(samples: Sequence[Sample], make: Make) -> list[Graphed]:
    """One graph for each module, in the order in which a step calls them. Buffers and random numbers stay as they were.

    Raises RuntimeError where a module cannot be captured, or its graph does not give what the module gives.
    """
    modules = [_ByPosition(sample) for sample in samples]
    aliased = [_Aliased(module) for module in modules]
    device = _one_device(samples)
    # torch captures on the current device.
    with as_current(device), no_trace(samples), under_autocast(samples[0]), torch.enable_grad():
        results, drawn = _results(), _states_of_generators()
        # On the script's stream, where DDP made the parameters' nodes: torch warns of gradients from another stream.
        expected = [_without_a_trace(m, sample) for m, sample in zip(modules, samples, strict=True)]
        if drawn.items() - _states_of_generators().items():
            raise RuntimeError("a pass draws from a random generator of the script's, and a graph would not")
        gc.collect()  # else what refers to itself looks as if somebody held it
        if _results() - results:
            raise RuntimeError("a pass leaves a result somewhere that it does not return, and a graph would not")
        with on_a_side_stream(device):
            for _ in range(_PASSES):
                for one, sample in zip(aliased, samples, strict=True):
                    one_pass(one, (*sample.inputs(), *one.aliases()), sample.module)
        given = tuple((*sample.inputs(), *one.aliases()) for sample, one in zip(samples, aliased, strict=True))
        with safe_captures(device):
            # Without passes of its own, which would make the aliases' nodes on yet another stream.
            made = make(tuple(aliased), given, num_warmup_iters=0)
        graphed = [one.graphed(call) for one, call in zip(aliased, made, strict=True)]
        for sample, module, call, what in zip(samples, modules, graphed, expected, strict=True):
            prove(sample, one_pass(call, sample.inputs(), module), what)
    return graphed


def _results() -> set[int]:
    """The number of each tensor's object through which a backward pass may go, and that somebody holds.

    A loss that a layer leaves in an object, or in a list of its file, is one more than before the pass.
    """
    tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor]
    return {id(one) for one in tensors if one.grad_fn is not None}


def _states_of_generators() -> dict[int, bytes]:
    """The number of each random generator's object, of Python or numpy, wherever the script has it → its state."""
    numpy = sys.modules.get("numpy")
    kinds = (random.Random, numpy.random.BitGenerator) if numpy is not None else (random.Random,)
    found = [one for one in gc.get_objects() if issubclass(type(one), kinds)]
    with_states = [one for one in found if not isinstance(one, random.SystemRandom)]
    return {id(one): _state(one.getstate() if isinstance(one, random.Random) else one.state) for one in with_states}


def _state(of_generator: Any) -> bytes:
    """The state of a random generator, to be compared. To print one of numpy's takes 20 ms, and follows its options."""
    return pickle.dumps(of_generator)


def _without_a_trace(by_position: _ByPosition, sample: Sample) -> list[torch.Tensor]:
    """`one_pass` of the module itself. RuntimeError if the pass puts other things in the place of those that it holds.

    A running mean that is assigned and not written in place, a loss or a count that the script reads from the module or
    from a list in it: a graph would leave in their place what its capture has put there.
    """
    held = [(inner, _held_by(inner)) for inner in sample.module.modules()]
    settings = settings_of([inner for inner, _ in held])
    found = one_pass(by_position, sample.inputs(), by_position)
    anew = [(inner, name) for inner, before in held for name in _set_anew(before, _held_by(inner))]
    changed = [one for one in settings if not _same(one[2], one[0].get(one[1]))]
    for place, name, value in changed:  # such as a count in an object of the script's, which nothing else puts back
        place[name] = value
    if anew:
        inner, name = anew[0]
        raise RuntimeError(f"{type(inner).__name__} sets its {name} anew in each pass, and a graph would not")
    if changed:
        raise RuntimeError(
            f"{type(sample.module).__name__} changes {changed[0][1]} in each pass, and a graph would not"
        )
    return found


def _set_anew(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in after if not _same(before.get(name, _NOTHING), after[name])]


_NOTHING = object()
_CONTAINERS = list, dict


def _containers_of(module: nn.Module) -> dict[str, Any]:
    """The module's own lists and dictionaries, by name: a pass may leave something in them for the script."""
    own = ((name, value) for name, value in vars(module).items() if name not in OF_EVERY_MODULE)
    return {name: value for name, value in own if type(value) in _CONTAINERS}


def _held_by(module: nn.Module) -> dict[str, Any]:
    """Attributes and buffers of the module alone, by name; of a list or a dictionary a copy."""
    copies = {name: copy.copy(value) for name, value in _containers_of(module).items()}
    return {**vars(module), **copies, **dict(module.named_buffers(recurse=False))}


def _same(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, (*_CONTAINERS, tuple)):
        parts = [[*each, *each.values()] if isinstance(each, dict) else each for each in (one, other)]
        return len(one) == len(other) and all(map(_same, *parts))
    return isinstance(one, CONSTANTS) and bool(one == other)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(content)


def _one_device(samples: Sequence[Sample]) -> torch.device:
    of_parameters = [parameter.device for sample in samples for parameter in sample.module.parameters()]
    of_inputs = [like.device for sample in samples for like in sample.signature.tensors]
    device, *others = dict.fromkeys([*of_parameters, *of_inputs])
    if others:
        raise RuntimeError(f"what is to be captured is on several devices: {device}, {', '.join(map(str, others))}")
    return device


def one_pass(call: Callable[..., Any], inputs: Sequence[torch.Tensor], module: nn.Module) -> list[torch.Tensor]:
    """Outputs and gradients, copied, under random numbers that are the same each time."""
    device = next(module.named_parameters())[1].device
    seed(device, 0)
    before = _drawn_on_the_host(device)
    outputs, _ = tensors_of(call(*inputs))
    if _drawn_on_the_host(device) != before:
        # LayerDrop, for one, decides by such a number which layers run: a graph would keep one decision for ever.
        raise RuntimeError(f"{type(module).__name__} draws random numbers on the host, and a graph would not")
    found = [output.detach().clone() for output in outputs]
    differentiable = [output for output in outputs if output.requires_grad]
    wanted = [tensor for tensor in (*inputs, *module.parameters()) if tensor.requires_grad]
    if differentiable and wanted:
        seed(device, 1)  # whatever the forward pass has drawn
        sent = [torch.randn_like(output) for output in differentiable]
        gradients = torch.autograd.grad(differentiable, wanted, sent, allow_unused=True)
        found += [gradient.detach().clone() for gradient in gradients if gradient is not None]
    return found


def _drawn_on_the_host(device: torch.device) -> list[Any]:
    """The states of the random generators from which a module that computes on `device` can draw beside it."""
    states: list[Any] = [random.getstate()]
    if "numpy" in sys.modules:
        states.append(_state(sys.modules["numpy"].random.get_state()))
    if device.type != "cpu":
        states.append(torch.get_rng_state().tolist())
    return states


def prove(sample: Sample, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Both as `one_pass` gives them. RuntimeError unless the graph's are the module's, and finite."""
    narrow = sample.autocast is not None or any(t.dtype in (torch.float16, torch.bfloat16) for t in expected)
    if len(found) != len(expected):
        raise RuntimeError(f"the graph of {type(sample.module).__name__} gives other gradients than the module")
    for one, other in zip(found, expected, strict=True):
        if not other.isfinite().all():
            raise RuntimeError(
                f"{type(sample.module).__name__} gives numbers that are not finite: nothing to compare with"
            )
        difference = float((one.double() - other.double()).norm())
        if not difference <= (_SIXTEEN_BIT if narrow else _FULL) * float(other.double().norm()):
            raise RuntimeError(f"the graph of {type(sample.module).__name__} does not give what the module gives")


@contextlib.contextmanager
def no_trace(samples: Sequence[Sample]) -> Iterator[None]:
    """Put buffers and random numbers back afterwards: warm-up passes move BatchNorm's statistics and draw numbers."""
    modules = [inner for sample in samples for inner in sample.module.modules()]
    held = [(inner, dict(vars(inner)), dict(inner.named_buffers(recurse=False))) for inner in modules]
    filled = [(value, copy.copy(value)) for inner in modules for value in _containers_of(inner).values()]
    buffers = [buffer for sample in samples for buffer in sample.module.buffers()]
    before = [buffer.clone() for buffer in buffers]
    devices = {t.device for sample in samples for t in (*sample.module.parameters(), *buffers) if t.is_cuda}
    pythons, numpy = random.getstate(), sys.modules.get("numpy")
    numpys = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            random.setstate(pythons)
            if numpy:
                numpy.random.set_state(numpys)
            for container, content in filled:
                _refill(container, content)
            for inner, attributes, own in held:  # a pass may put another tensor in the place of one
                vars(inner).update(attributes)
                for name, buffer in own.items():
                    setattr(inner, name, buffer)
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)


def under_autocast(sample: Sample, cached: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Autocast as the script calls the module. Without the cache a graph does not hold weights cast once for all."""
    return torch.autocast(
        sample.device.type, dtype=sample.autocast, enabled=sample.autocast is not None, cache_enabled=cached
    )
