"""Makes one step of several of the script's: all but the last keep their gradients, and nothing steps by them.

The script still calls whatever it calls. Until the last of the steps, its optimizer finds no gradient and so does
nothing, `zero_grad` leaves what is kept, clipping only tells the norm and the gradient scaler waits. At the last one
DDP reduces the sum of all, which is divided by their number before anything reads it.

Learning-rate schedulers go on with every step of the script: the rate stays a function of the samples seen.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autoddp.knobs import Configuration
from autoddp.knobs.micro_batches import ACCUMULATE_STEPS
from autoddp.worker.ddp import Wrapped, is_joining, must_reduce
from autoddp.worker.effect import Effect
from autoddp.worker.sync_switch import ReductionSwitch, StillThere

_CLIPPERS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")


class Accumulation(Effect):
    """`install()` once, before the script's optimizers step; tell it of each forward pass, and set `steps`.

    `gives_up(why)` is called when the script turns out to do what cannot be done with several steps in one.
    """

    def __init__(
        self, switch: ReductionSwitch, wrapped: Callable[[], Sequence[Wrapped]], gives_up: Callable[[str], None]
    ) -> None:
        self._switch, self._wrapped, self._gives_up = switch, wrapped, gives_up
        self._steps = 1
        self.reads: Callable[[], None] = lambda: None
        """Told before gradients are read, and divided."""
        self.owes: Callable[[], None] = lambda: None
        """Told where gradients stay unreduced and no later step will reduce them."""
        self.why_not: Callable[[], str] = lambda: ""
        """Asked after a backward pass, before its gradients are kept for a later step: why they must not be."""
        self._unchanged = StillThere(ACCUMULATE_STEPS.name)
        self._aside: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._start_over()
        self.clears = False
        """Whether the script has called `zero_grad` of what DDP reduces: kept gradients can be protected from it."""
        self._stepped: set[bool] = set()  # by optimizers that hold some of what DDP reduces: do they hold all?

    def _start_over(self) -> None:
        self._number = 0  # steps of the script since the last real one
        self._kept = 0  # of these, whose gradients are part of the present ones
        self._seen: dict[nn.Parameter, tuple[torch.Tensor, int]] = {}  # gradients as last kept, with their version
        self._holding = self._averaged = False
        self._unchanged.end()

    def apply(self, configuration: Configuration) -> None:
        """See `Effect`."""
        self.steps = configuration.steps_per_update

    @property
    def steps(self) -> int:
        """Steps of the script that are one: 1 as written."""
        return self._steps

    @steps.setter
    def steps(self, count: int) -> None:
        """At a step boundary."""
        self._put_back()
        self._start_over()
        self._steps = count

    @property
    def _holds(self) -> bool:
        """Whether the script's present step is not the last of its kind."""
        return self._number < self._steps - 1

    def _keeps(self) -> bool:
        """The same, asked after a backward pass. Where it must not be, what was put off is reduced here."""
        if self._holds and self.why_not():
            self.stop()
        return self._holds

    def stop(self) -> None:
        """Each step of the script is one again; all ranks call it at the same place."""
        if self._steps > 1:
            self.steps = 1
            self.owes()

    def model_built(self) -> None:
        """The script has built a DDP model. After its first steps, each of its steps is one again.

        It may train the new model next, and drop the old one. Each rank's garbage collector frees the old model at
        another time, so ranks could disagree on which gradients to expect, while all must reduce at the same steps.
        """
        if self._steps > 1 and self._stepped:
            self.stop()
            self._gives_up("the script builds another model")

    @property
    def one_optimizer(self) -> bool:
        """Whether all that DDP reduces has been stepped by one optimizer, so far."""
        return self._stepped == {True}

    def install(self) -> None:
        """Stand in front of whatever reads, clears or uses gradients. The script has bound none of these names yet."""
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        Optimizer.zero_grad = self._clearing(Optimizer.zero_grad, _held_by_optimizer)  # type: ignore[method-assign]
        nn.Module.zero_grad = self._clearing(nn.Module.zero_grad, nn.Module.parameters)  # type: ignore[method-assign]
        for name in _CLIPPERS:
            for place in (clip_grad, torch.nn.utils):
                if hasattr(place, name):
                    setattr(place, name, self._clipping(getattr(place, name)))
        scaler = torch.amp.GradScaler
        scaler.unscale_ = self._unscaling(scaler.unscale_)  # type: ignore[method-assign]
        scaler.step = self._stepping(scaler.step)  # type: ignore[method-assign]
        scaler.update = self._updating(scaler.update)  # type: ignore[method-assign]

    def forward_begins(self, ddp: DDP) -> None:
        """A forward pass is about to run; what is decided here holds for its backward pass."""
        if self._kept and any(p.grad is not kept for p, (kept, _) in self._seen.items()):
            self._give_up("the script clears gradients without zero_grad")
        if self._steps > 1 and is_joining(ddp):
            self._give_up("the script uses join()")
        if self._holds and torch.is_grad_enabled() and self._switch.reduces(ddp):
            self._unchanged.check()
            self._unchanged.begin(self._parameters())
            self._switch.put_off = not must_reduce(ddp)  # reduced twice is the same: the mean of equal parts is they

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        held = {id(p) for p in _held_by_optimizer(optimizer)}
        of_it = [id(p) in held for p in self._parameters() if p.requires_grad or id(p) in held]
        if not any(of_it):
            return
        self._stepped.add(all(of_it))
        if self._steps == 1:
            return
        if any(callable(value) for value in (*args[1:], *kwargs.values())):
            return self._give_up("the optimizer runs backward itself (a closure)")
        if not all(of_it):
            self._give_up("no one optimizer steps all that DDP reduces")
            return self.owes()
        self._holding = self._keeps()
        if not self._holding:
            return self._average()
        self._aside = [(p, p.grad) for p in self._parameters() if p.grad is not None]
        for p, _ in self._aside:
            p.grad = None

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._steps == 1 or not self._is_ours(_held_by_optimizer(optimizer)):
            return
        if not self._holding:
            return self._start_over()
        self._put_back()
        self._number, self._kept = self._number + 1, self._kept + 1
        self._seen = {p: (p.grad, p.grad._version) for p in self._parameters() if p.grad is not None}

    def _put_back(self) -> None:
        for p, gradient in self._aside:
            p.grad = gradient
        self._aside = []

    def _give_up(self, why: str) -> None:
        self.steps = 1
        self._gives_up(why)

    @torch.no_grad()
    def _average(self) -> None:
        """The mean over the steps, of what DDP has reduced of their sum; once, before anything reads it."""
        self.reads()
        if self._averaged or not self._kept:
            return
        self._averaged = True
        for p in self._parameters():
            if p.grad is not None:
                p.grad.div_(self._kept + 1)

    def _parameters(self) -> list[nn.Parameter]:
        return [p for wrapped in self._wrapped() for p in wrapped.parameters]

    def _is_ours(self, parameters: Iterable[torch.Tensor]) -> bool:
        ours = {id(p) for p in self._parameters()}
        return any(id(p) in ours for p in parameters)

    def _clearing(self, clear: Callable[..., None], parameters: Callable[[Any], Iterable[torch.Tensor]]) -> Any:
        @functools.wraps(clear)
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> None:
            if self._is_ours(parameters(owner)):
                self.clears = True
                if self._kept and not self._has_more():
                    return
                if self._steps > 1:  # this step's gradients are thrown away, and with them those before
                    self._start_over()
            clear(owner, *args, **kwargs)

        return zero_grad

    def _has_more(self) -> bool:
        """Whether a backward pass has run since the last gradients were kept."""
        return any(p.grad is not kept or kept._version != version for p, (kept, version) in self._seen.items())

    def _clipping(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(clip)
        def clipped(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if self._steps == 1:
                return clip(parameters, *args, **kwargs)
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            if not self._is_ours(parameters) or not self._keeps():
                self._average()
                return clip(parameters, *args, **kwargs)
            if clip.__name__ != "clip_grad_norm_":
                return None
            return clip(parameters, math.inf, *args[1:], **{k: v for k, v in kwargs.items() if k != "max_norm"})

        return clipped

    def _unscaling(self, unscale: Callable[..., None]) -> Any:
        @functools.wraps(unscale)
        def unscale_(scaler: Any, optimizer: Optimizer) -> None:
            if self._steps > 1 and self._is_ours(_held_by_optimizer(optimizer)):
                if self._keeps():
                    return
                self._average()
            unscale(scaler, optimizer)

        return unscale_

    def _stepping(self, step: Callable[..., Any]) -> Any:
        @functools.wraps(step)
        def scaled_step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self._steps == 1 or not self._is_ours(_held_by_optimizer(optimizer)):
                return step(scaler, optimizer, *args, **kwargs)
            if self._keeps():
                return optimizer.step(*args, **kwargs)  # finds no gradient; whoever counts steps counts it
            self._average()
            result = step(scaler, optimizer, *args, **kwargs)
            if self._averaged:  # the scaler has found infinities, and the optimizer has not stepped
                self._start_over()
            return result

        return scaled_step

    def _updating(self, update: Callable[..., None]) -> Any:
        @functools.wraps(update)
        def updated(scaler: Any, *args: Any, **kwargs: Any) -> None:
            if not self._holding:  # what was kept is scaled by the present scale
                update(scaler, *args, **kwargs)

        return updated


def _held_by_optimizer(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
