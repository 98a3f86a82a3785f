"""Puts the reductions of a step's micro-batches off to the last one, in scripts that accumulate without `no_sync`.

Reducing after each backward pass gives mean(g1) + mean(g2) + …, reducing once gives mean(g1 + g2 + …), which is the
same. Where a step comes earlier than expected, its gradients are reduced before torch reads them. They cannot be
reduced where the script itself reads them, as `p.grad`, because one rank alone may do so: the job stops there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import Optimizer

from autoddp.knobs import Configuration
from autoddp.knobs.micro_batches import DEFER_REDUCTIONS, DISCARDS_GRADIENTS, READS_GRADIENTS
from autoddp.worker.ddp.backward import after_this_backward, when_backward_begins
from autoddp.worker.ddp.handlers import DdpEvents
from autoddp.worker.ddp.private import is_joining, must_reduce, version_of
from autoddp.worker.ddp.wrapped import Wrapped
from autoddp.worker.effects.base import Effect
from autoddp.worker.gradients.access import GradientHandler, OwnReads, are_reduced, gradient_of, held_by
from autoddp.worker.gradients.switch import ReductionSwitch, StillThere, left_unreduced

_CHUNK = 25 * 2**20  # bytes that are flattened at once
_EARLY = 5  # steps in a row with fewer passes than expected: at the end of an epoch there is one


class _Pass:
    """A forward pass that was counted: whether anybody goes backward from it is not known yet."""

    def __init__(self, parameters: Sequence[torch.Tensor], was_pending: bool) -> None:
        self.was_pending = was_pending
        self.parameters = parameters
        self.is_put_off = self.was_taken_back = False
        self.look_again()

    def look_again(self) -> None:
        """Take note of the gradients anew: those that are there now are another pass's."""
        self._before = self._gradients()

    def _gradients(self) -> list[tuple[int, int] | None]:
        gradients = map(gradient_of, self.parameters)  # their identities, because nothing may hold them
        return [None if gradient is None else (id(gradient), version_of(gradient)) for gradient in gradients]

    @property
    def has_given_gradients(self) -> bool:
        """Whether anything was added to a gradient since, which is not cleared again."""
        now = self._gradients()
        return any(one is not None and one != before for one, before in zip(now, self._before, strict=True))


class ImplicitNoSync(Effect, DdpEvents, GradientHandler):
    """A handler of gradients and of DDP's events. Set `every`, micro-batches per step; 1 puts nothing off."""

    def __init__(self, switch: ReductionSwitch, wrapped: Callable[[], Sequence[Wrapped]]) -> None:
        self._switch = switch
        self._wrapped = wrapped
        self._every = 1
        self._forwards = 0
        self._last: _Pass | None = None
        """The last forward pass that was counted, until a backward pass from it begins."""
        self.pending = False
        """Whether there may be gradients that are not reduced."""
        self._parameters = StillThere(DEFER_REDUCTIONS.name)
        self._own_reads = OwnReads()  # while there may be gradients that are not reduced
        # Of which the last forward pass was put off. DDP broadcasts buffers only after one that was not.
        self._broadcasts: weakref.WeakSet[DDP] = weakref.WeakSet()
        self.steps_by_closure = False
        """Whether an optimizer of DDP's parameters runs backward passes itself: it may read gradients after each."""
        self.reads: Callable[[Sequence[torch.Tensor]], object] = lambda given: None
        """Called before an optimizer or another function of torch reads gradients, and before they are reduced here;
        with what that function was given: parameters or gradients, and nothing by an optimizer."""
        self._early = 0
        """Steps in a row of which no pass has reduced."""
        self.comes_early: Callable[[], None] = lambda: None
        """Called once for `_EARLY` of them: nothing is computed while their gradients are reduced."""
        self.has_read: Callable[[], None] = lambda: None
        """Called after a function of torch that may have changed gradients (clipping does); not after an optimizer."""

    def apply(self, configuration: Configuration) -> None:
        """See `Effect`."""
        self.every = DEFER_REDUCTIONS.of(configuration) or 1

    @property
    def every(self) -> int:
        """Micro-batches per step, of which only the last reduces."""
        return self._every

    @every.setter
    def every(self, micro_batches: int) -> None:
        """Set the number, at a step boundary."""
        self._every, self._forwards, self._switch.put_off = micro_batches, 0, False
        self._last = None
        self._is_reduced()

    def end(self) -> None:
        """Put nothing off from now on; allowed at any time. What was put off before is reduced when it is read."""
        self._every, self._switch.put_off = 1, False

    def forward_begins(self, ddp: DDP) -> None:
        """A forward pass is about to run; what is decided here holds for its backward pass."""
        self._look_back()
        self._switch.put_off = False
        if ddp in self._broadcasts:
            self._broadcasts.discard(ddp)
            ddp.require_forward_param_sync = True
        if self.pending:
            self._parameters.check()
            if self._own_reads.has_read():
                raise left_unreduced(DISCARDS_GRADIENTS, DEFER_REDUCTIONS.name)
        if self._every < 2 or not (torch.is_grad_enabled() and self._switch.reduces(ddp)) or is_joining(ddp):
            return
        if not ddp.training:  # an evaluation, which may be one rank's alone
            return
        self._forwards += 1
        parameters = next(w.parameters for w in self._wrapped() if w.ddp is ddp)
        self._last = this = _Pass(parameters, self.pending)
        self._switch.put_off = this.is_put_off = self._forwards % self._every != 0 and not must_reduce(ddp)
        if this.is_put_off:
            self._broadcasts.add(ddp)
            self._is_not_reduced(parameters)

    def returned(self, ddp: DDP, what: Any) -> Any:
        """See `DdpEvents`. Only a backward pass from what the module has returned reduces what was put off before."""
        last = self._last
        if last is not None and not when_backward_begins(what, partial(self._goes_backward, last)):
            self._last = None  # the gradients may come from an object in which DDP finds no tensors: it counts
        if self.pending and self._switch.reduces(ddp):
            when_backward_begins(what, partial(self._reduces, last))
        return what

    def _reduces(self, this: _Pass | None) -> None:
        """A backward pass begins in which DDP reduces what was put off before."""
        self._early = 0
        if self.pending and this is not None:
            after_this_backward(partial(self._has_passed, this))
        self._is_reduced()

    def _has_passed(self, this: _Pass) -> None:
        if not this.has_given_gradients:  # `torch.autograd.grad` gives the parameters none, so DDP has reduced nothing
            self._is_not_reduced(this.parameters)

    def _goes_backward(self, this: _Pass) -> None:
        """A backward pass from `this` begins: perhaps after other forward passes, so that it was taken back."""
        if this is self._last:
            self._last = None
        elif this.was_taken_back:
            this.was_taken_back = False
            self._forwards += 1
            if this.is_put_off:
                self._is_not_reduced(this.parameters)
            if self._last is not None:  # a later forward pass, perhaps of one rank alone: this one gives the gradients
                self._last.was_pending |= this.is_put_off
                after_this_backward(self._last.look_again)

    def _look_back(self) -> None:
        """Take back what was decided for a forward pass that nobody has gone backward from so far.

        One rank alone may run such passes, to log or to evaluate, and all ranks must reduce in the same pass.
        """
        last, self._last = self._last, None
        if last is None or last.has_given_gradients:
            return
        last.was_taken_back = True
        self._forwards = max(0, self._forwards - 1)
        if self.pending and not last.was_pending:
            self._is_reduced()

    def _is_not_reduced(self, parameters: Sequence[torch.Tensor]) -> None:
        self.pending = True
        self._parameters.begin(parameters)
        self._own_reads.begin(parameters)

    def _is_reduced(self) -> None:
        self.pending = False
        self._parameters.end()
        self._own_reads.end()

    def before_reading(self, parameters: Sequence[torch.Tensor]) -> bool:
        """See `GradientHandler`."""
        self.reduce_what_is_missing(parameters)
        return False

    def after_reading(self) -> None:
        """See `GradientHandler`."""
        self.has_read()

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """See `GradientHandler`."""
        if are_reduced(held_by(optimizer), self._wrapped()):
            if has_closure:
                self.steps_by_closure = True
                self.end()
            self.reduce_what_is_missing()

    def after_step(self, optimizer: Optimizer) -> None:
        """See `GradientHandler`."""
        if self._forwards and are_reduced(held_by(optimizer), self._wrapped()):
            self._forwards = 0

    def was_read(self) -> bool:
        """Whether the script itself has read gradients that are not reduced, since this was last looked at."""
        return self._own_reads.has_read()

    def reduce_what_is_missing(self, given: Sequence[torch.Tensor] = ()) -> None:
        """Put the mean over the ranks into all gradients, if their reduction was put off.

        `given` is what a function of torch is about to read. JobStops if the script itself has read others.
        """
        self._look_back()
        self.reads(given)
        if not self.pending:
            return
        if self._own_reads.has_read(given):
            raise left_unreduced(READS_GRADIENTS, DEFER_REDUCTIONS.name)
        self.reduce(self._wrapped())
        self._early += 1
        if self._early == _EARLY:
            self.comes_early()
        self._forwards = 0
        self._is_reduced()

    @staticmethod
    def reduce(objects: Iterable[Wrapped]) -> None:
        """Put the mean over the ranks into the gradients of these objects; all ranks call it at the same place.

        Some parts of a gradient may have been reduced before. They are equal on all ranks, and their mean is that part.
        Of several objects around the same parameters one counts: on some ranks an earlier one may be freed already.
        """
        for wrapped in {one.model: one for one in objects}.values():
            ddp = wrapped.ddp
            if ddp is None:
                continue
            parameters = wrapped.parameters
            if ddp.find_unused_parameters:
                _complete(parameters, ddp.process_group)
            for some in _chunks([p.grad for p in parameters if p.grad is not None]):
                _average(some, ddp.process_group)


def _complete(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Give parameters that only other ranks have used a gradient of zeros, as DDP does; unused ones get none."""
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    for p, by_any in zip(parameters, used.tolist(), strict=True):
        if by_any and p.grad is None:
            p.grad = torch.zeros_like(p)


def _chunks(gradients: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The gradients in order, in lists of one type and device that are small enough to be copied into one buffer."""
    found: list[list[torch.Tensor]] = []
    room = 0
    for gradient in gradients:
        size = gradient.numel() * gradient.element_size()
        alike = found and (found[-1][0].dtype, found[-1][0].device) == (gradient.dtype, gradient.device)
        if not alike or size > room:
            found.append([])
            room = _CHUNK
        found[-1].append(gradient)
        room -= size
    return found


def _average(gradients: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).div_(group.size())
    dist.all_reduce(flat, group=group)
    offset = 0
    for gradient in gradients:
        gradient.copy_(flat[offset : offset + gradient.numel()].view(gradient.shape))
        offset += gradient.numel()
