"""Watches how a model and its blocks are called, to know what a graph could stand for."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoddp.knobs.computing import BLOCKS, WHOLE_MODEL
from autoddp.worker.ddp.private import hooks_inside
from autoddp.worker.ddp.wrapped import Wrapped
from autoddp.worker.graphs.capture import Sample
from autoddp.worker.graphs.signature import Signature, Unfit, signature_of, surroundings, tensors_of
from autoddp.worker.graphs.stand_in import Forward, StandIn


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The longest list of modules in the model, each of several layers, as a transformer has it; empty if none."""
    lists = [list(m.children()) for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    fitting = [found for found in lists if len(found) > 1 and all(any(b.children()) for b in found)]
    return max(fitting, key=len, default=[])


@dataclass
class Seen:
    """What was seen of one module: `note` each call, `step` after each step, then `why_not` and `sample()`."""

    model: nn.Module
    module: nn.Module
    stand_in: StandIn | None = None
    calls: int = 0
    """Calls that may have a backward pass, since the last step boundary."""
    signature: Signature | None = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    autocast: torch.dtype | None = None
    surroundings: tuple[object, ...] | None = None
    order: int = 0
    why_not: str = ""

    def note(self, args: Sequence[Any], kwargs: Mapping[str, Any], returned: Any, order: int) -> None:
        """A call that may have a backward pass; `order` among all calls."""
        try:
            tensors_of(returned)
            signature, tensors = signature_of(args, kwargs)
        except Unfit as why:
            self.why_not = str(why)
            return
        if self.signature not in (None, signature):
            self.why_not = "its inputs change from step to step"
        self.calls, self.order, self.signature = self.calls + 1, order, signature
        self.tensors = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        device = next((p for _, p in self.module.named_parameters()), torch.empty(0)).device.type
        around = surroundings(device)
        if self.surroundings not in (None, around):
            self.why_not = "autocast or another setting changes from step to step"
        self.surroundings = around
        self.autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def step(self) -> None:
        """The script's step is over."""
        if self.calls != 1:
            self.why_not = self.why_not or f"a step calls it {self.calls} times"
        self.calls = 0

    def sample(self) -> Sample:
        """The module's last call, once one was seen."""
        assert self.signature is not None
        return Sample(self.model, self.module, self.signature, self.tensors, self.autocast)


class Watching:
    """`step()` at each step boundary; then `why_not(mode)` and, if that is "", `samples(mode)`. `stop()` when done."""

    def __init__(self, models: list[nn.Module]) -> None:
        self._of: dict[str, list[Seen]] = {
            WHOLE_MODEL: [Seen(model, model) for model in models],
            BLOCKS: [Seen(model, block) for model in models for block in blocks_of(model)],
        }
        self._steps = 0
        self._calls = 0
        for seen in self._all():
            self._watch(seen)

    def _all(self) -> list[Seen]:
        return [seen for of_mode in self._of.values() for seen in of_mode]

    def _watch(self, seen: Seen) -> None:
        def answer(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            returned = forward(*args, **kwargs)
            if torch.is_grad_enabled() and not seen.why_not:
                self._calls += 1
                seen.note(args, kwargs, returned, self._calls)
            return returned

        try:
            seen.stand_in = StandIn(seen.module, answer)
        except Unfit as why:
            seen.why_not = str(why)

    def step(self) -> None:
        """The script's step is over."""
        for seen in self._all():
            seen.step()
        self._steps += 1

    def stop(self) -> None:
        """Take the stand-ins away."""
        for seen in self._all():
            if seen.stand_in is not None:
                seen.stand_in.leave()

    def why_not(self, mode: str) -> str:
        """Why no graph can stand for the whole model, or for its blocks."""
        of_mode = self._of[mode]
        if not of_mode or not self._steps:
            return "the model has no list of blocks" if self._steps else "no step was seen"
        for seen in of_mode:
            why = seen.why_not or _why_not(seen.module)
            if why:
                return f"{type(seen.module).__name__}: {why}"
        for model in {id(seen.model) for seen in of_mode}:
            # They are captured together, under the settings of one of them.
            if len({seen.surroundings for seen in of_mode if id(seen.model) == model}) > 1:
                return "its blocks are called under different autocast, or other settings"
        return ""

    def samples(self, mode: str) -> list[Sample]:
        """The last call of each module, in the order in which a step calls them."""
        ordered = sorted(self._of[mode], key=lambda seen: seen.order)
        return [seen.sample() for seen in ordered if seen.signature is not None]


def why_of_ignored(wrapped: Sequence[Wrapped]) -> str:
    """Why no graph can stand for these models; "" if DDP reduces all their parameters.

    DDP copies the gradients that it reduces out of the graph's buffers. The next replay would overwrite the others.
    """
    return "" if all(w.reduces_all for w in wrapped) else "the script tells DDP to ignore some of its parameters"


def _why_not(module: nn.Module) -> str:
    if next(module.named_parameters(), None) is None:
        return "it has no parameters"
    if any(isinstance(inner, nn.SyncBatchNorm) for inner in module.modules()):
        return "a SyncBatchNorm inside it talks with other ranks"
    if any(hooks_inside(module)):
        return "a module inside it has hooks, which a graph would not call"
    if any(buffer.requires_grad for buffer in module.buffers()):
        return "it has trainable buffers"
    kinds = _generators()
    if any(isinstance(value, kinds) for inner in module.modules() for value in vars(inner).values()):
        return "it holds a random generator of its own: a capture would draw from it, and a graph would not"
    return ""


def _generators() -> tuple[type, ...]:
    """Classes of random generators that a module may hold beside those of the process, whose states are put back."""
    numpy = sys.modules.get("numpy")
    of_numpy = (numpy.random.Generator, numpy.random.RandomState) if numpy is not None else ()
    return torch.Generator, random.Random, *of_numpy
