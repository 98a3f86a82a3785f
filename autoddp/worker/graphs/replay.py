"""When a captured graph may answer in place of its module, and how its buffers are kept apart from the script's."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from autoddp.errors import JobStops
from autoddp.worker.ddp.private import hooks_inside
from autoddp.worker.graphs.capture import Graphed, Sample, under_autocast
from autoddp.worker.graphs.signature import (
    CONSTANTS,
    Unfit,
    put_together,
    settings_of,
    signature_of,
    surroundings,
    tensors_of,
)
from autoddp.worker.graphs.stand_in import Forward, StandIn


class _Pass:
    """One forward pass through a graph, alive as long as a backward pass may come."""

    overwritten = False
    """Whether what the backward pass reads is gone."""

    def __init__(self, place: int) -> None:
        self.place = place


class SharedMemory:
    """The memory of graphs that were captured together: which pass has overwritten the values of which other.

    The capture runs all modules forward and then backward in the reverse order. Memory is used again as soon as it is
    free in that order. So a module's forward or backward pass may overwrite what its own backward pass and those of
    later modules read, and never what those of earlier modules read. `place` is a module's number in the order.
    """

    def __init__(self) -> None:
        self._last: dict[int, Callable[[], _Pass | None]] = {}

    def is_free(self, place: int) -> bool:
        """Whether the module may run forward: no backward pass that may still come reads what it overwrites."""
        return all(one.overwritten for one in self._from(place))

    def begin(self, place: int) -> _Pass:
        """Note that the module runs forward, and so overwrites what earlier passes have kept."""
        self._overwrite(place)
        this = _Pass(place)
        self._last[place] = weakref.ref(this)
        return this

    def end(self, this: _Pass) -> None:
        """Note that the module runs backward. JobStops if the values that this pass needs are overwritten."""
        if this.overwritten:
            raise JobStops(
                "autoddp: a backward pass needs values that a CUDA graph has overwritten: it is the second one of its "
                "forward pass (retain_graph=True), or not in the order of the first steps; tune without --cuda-graphs"
            )
        self._overwrite(this.place)

    def _from(self, place: int) -> list[_Pass]:
        return [one for at, last in self._last.items() if at >= place and (one := last()) is not None]

    def _overwrite(self, place: int) -> None:
        for one in self._from(place):
            one.overwritten = True


class _Gate(torch.autograd.Function):
    """Copies the graph's outputs, which the next replay overwrites, and notices the backward pass."""

    @staticmethod
    def forward(ctx: Any, memory: SharedMemory, this: _Pass, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.memory, ctx.this = memory, this
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.memory.end(ctx.this)
        return None, None, *gradients


class Replay:
    """A module's graph. `arm()` before each forward pass whose gradients DDP will reduce; `stand()` and `leave()`.

    A graph is one set of buffers. So the module computes by itself, as written, wherever a replay would not be the
    same: called in another way, in another mode, with parameters elsewhere; again before the backward pass of the last
    call; with gradients that DDP does not copy out at once, as under `no_sync`. A backward pass cannot be answered in
    another way: where its values are gone it raises.
    """

    def __init__(self, sample: Sample, graphed: Graphed, memory: SharedMemory, place: int) -> None:
        module = sample.module
        self._model, self._module, self._signature = sample.model, module, sample.signature
        self._graphed, self._memory, self._place = graphed, memory, place
        self._modules = list(module.modules())
        # By their names, because a script may put something else in the place of one: for good, or for a pass, as
        # functional_call does with parameters. What was there is held: nothing else gets the place of what is gone.
        self._held = [
            (place, name, value)
            for inner in self._modules
            for place in _places_in(inner)
            for name, value in place.items()
            if isinstance(value, (nn.Module, torch.Tensor))
        ]
        self._settings = [
            (place, name, len(value) if isinstance(value, (list, tuple)) else None)
            for place, name, value in settings_of(self._modules)
        ]
        self._hooks = hooks_inside(module)
        self._device = sample.device.type
        with under_autocast(sample):
            self._captured = self._state()
        self._armed = False
        self._stand_in: StandIn | None = None
        self.replayed = 0
        """Forward passes so far."""

    def stand(self) -> None:
        """Let the graph answer the calls of the module from here on."""
        self._stand_in = self._stand_in or StandIn(self._module, self._answer)

    def leave(self) -> None:
        """Let the module compute by itself again."""
        if self._stand_in is not None:
            self._stand_in.leave()
        self._stand_in = None

    def is_of(self, model: nn.Module) -> bool:
        """Whether the module is this model, or a block of it."""
        return model is self._model

    def arm(self, model: nn.Module, serves: bool) -> None:
        """DDP begins a forward pass of `model`. `serves`: whether it will reduce the gradients, and copy them out.

        A block that the pass before has not called is armed still.
        """
        if model is self._model:
            self._armed = serves

    def _answer(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = self._tensors_of(args, kwargs)
        if tensors is None:
            return forward(*args, **kwargs)
        this = self._memory.begin(self._place)
        outputs, structure = tensors_of(self._graphed(*tensors))
        self.replayed += 1
        differentiable = [output for output in outputs if output.requires_grad]
        gate = cast("Any", _Gate).apply
        gated = iter(gate(self._memory, this, *differentiable) if differentiable else ())
        return put_together([next(gated) if o.requires_grad else o.clone() for o in outputs], structure)

    def _tensors_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """A call's tensors, if the graph can serve it."""
        armed, self._armed = self._armed, False
        if not (armed and torch.is_grad_enabled() and self._memory.is_free(self._place)) or any(self._hooks):
            return None
        try:
            signature, tensors = signature_of(args, kwargs)
        except Unfit:
            return None
        return tensors if signature == self._signature and self._state() == self._captured else None

    def _state(self) -> tuple[object, ...]:
        """What the kernels have taken for granted, besides the arguments."""
        return (
            surroundings(self._device),
            [(module.training, len(vars(module)["_modules"])) for module in self._modules],
            # TorchScript keeps them in dictionaries of its own, which have no `get`.
            [_part(place[name] if name in place else None) for place, name, _ in self._held],  # noqa: SIM401
            [_setting(place.get(name), length) for place, name, length in self._settings],
        )


_PARTS = ("_modules", "_parameters", "_buffers")


def _places_in(module: nn.Module) -> list[dict[str, Any]]:
    """Dictionaries of the module alone: of its layers, parameters and buffers, and of its other attributes."""
    own = vars(module)
    return [own, *(own[name] for name in _PARTS)]


def _part(value: Any) -> tuple[int, int, bool] | int:
    """What tells a layer or a tensor from another one, and a tensor from itself at another address, if it has one."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return id(value), value.data_ptr(), value.requires_grad
    return id(value)


def _setting(value: Any, length: int | None = None) -> object:
    """A number, word or switch, as kernels were launched with it; of anything else, which object it is.

    Of a list or a tuple, which had that `length`, those in it: a script may append to a list what it logs.
    """
    if length is not None and isinstance(value, (list, tuple)):
        return [_setting(one) for one in value[:length]]
    return value if isinstance(value, CONSTANTS) else (id(value),)
