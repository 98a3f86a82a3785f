"""When a captured graph may answer in place of its module, and how its buffers are kept apart from the script's."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autoddp.worker.ddp import hooks_inside
from autoddp.worker.graphs.capture import Graphed, Sample, under_autocast
from autoddp.worker.graphs.signature import Unfit, put_together, signature_of, tensors_of
from autoddp.worker.graphs.stand_in import Forward, StandIn


class _Pass:
    """One forward pass through a graph, alive as long as its backward may come."""

    over = False


class _Gate(torch.autograd.Function):
    """Copies the graph's outputs, which the next replay overwrites, and notices the backward pass."""

    @staticmethod
    def forward(ctx: Any, this: _Pass, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.this = this
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.this.over = True
        return None, *gradients


class Replay:
    """A module's graph. `arm()` before each forward pass whose gradients DDP will reduce; `stand()` and `leave()`.

    A graph is one set of buffers. So the module computes by itself, as written, wherever a replay would not be the
    same: called in another way, in another mode, with parameters elsewhere; again before the backward pass of the last
    call; with gradients that DDP does not copy out at once, as under `no_sync`.
    """

    def __init__(self, sample: Sample, graphed: Graphed) -> None:
        module = sample.module
        self._model, self._module, self._signature = sample.model, module, sample.signature
        self._graphed = graphed
        self._modules = list(module.modules())
        self._tensors = [*module.parameters(), *module.buffers()]
        self._hooks = hooks_inside(module)
        self._device = self._tensors[0].device.type
        with under_autocast(sample):
            self._captured = self._state()
        self._armed = False
        self._last: Callable[[], _Pass | None] = lambda: None
        self._stand_in: StandIn | None = None
        self.replayed = 0
        """Forward passes so far."""

    def stand(self) -> None:
        """Answer for the module from here on."""
        self._stand_in = self._stand_in or StandIn(self._module, self._answer)

    def leave(self) -> None:
        """The module computes by itself again."""
        if self._stand_in is not None:
            self._stand_in.leave()
        self._stand_in = None

    def arm(self, model: nn.Module) -> None:
        """DDP begins a forward pass of `model` whose gradients it will reduce."""
        self._armed = self._armed or model is self._model

    def _answer(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = self._tensors_of(args, kwargs)
        if tensors is None:
            return forward(*args, **kwargs)
        outputs, structure = tensors_of(self._graphed(*tensors))
        this = _Pass()
        self._last = weakref.ref(this)
        self.replayed += 1
        differentiable = [output for output in outputs if output.requires_grad]
        gated = iter(_Gate.apply(this, *differentiable) if differentiable else ())  # type: ignore[no-untyped-call]
        return put_together([next(gated) if o.requires_grad else o.clone() for o in outputs], structure)

    def _tensors_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """A call's tensors, if the graph can serve it."""
        armed, self._armed = self._armed, False
        last = self._last()
        if not (armed and torch.is_grad_enabled()) or (last is not None and not last.over) or any(self._hooks):
            return None
        try:
            signature, tensors = signature_of(args, kwargs)
        except Unfit:
            return None
        return tensors if signature == self._signature and self._state() == self._captured else None

    def _state(self) -> tuple[object, ...]:
        """What the kernels have taken for granted, besides the arguments."""
        return (
            torch.is_autocast_enabled(self._device),
            torch.get_autocast_dtype(self._device),
            [module.training for module in self._modules],
            [(tensor.data_ptr(), tensor.requires_grad) for tensor in self._tensors],
        )
