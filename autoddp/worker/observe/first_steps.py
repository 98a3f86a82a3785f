"""What a script's first steps show of its gradients: their order, who changes or holds them, whether they may wait.

A tuning job asks before it offers `static_graph`, `defer_reductions`, `accumulate_steps` and `gradient_as_bucket_view`.
A recipe is bound to the model and not to the loop around it, which may have changed since, or be another script's: so
the real job asks again (`FirstSteps`, `views.BucketViews`).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs.job import OWN_HOOK, SPARSE
from autoddp.knobs.micro_batches import (
    ACCUMULATE_STEPS,
    CHANGES_GRADIENTS,
    DEFER_REDUCTIONS,
    DISCARDS_GRADIENTS,
    FINDS_UNUSED,
)
from autoddp.worker.ddp.backward import after_this_backward, when_backward_begins
from autoddp.worker.ddp.handlers import CAPTURES, DdpEvents
from autoddp.worker.ddp.model import Model
from autoddp.worker.ddp.private import base_of, tensors_of_static_graph, version_of
from autoddp.worker.ddp.wrapped import Wrapped
from autoddp.worker.gradients.access import OwnReads, parameters_of
from autoddp.worker.gradients.accumulation import Accumulation
from autoddp.worker.gradients.deferred import ImplicitNoSync
from autoddp.worker.gradients.equal_parameters import sum_of_bits
from autoddp.worker.gradients.switch import left_unreduced
from autoddp.worker.gradients.views import held_elsewhere

_READS = 20  # of gradients, by an optimizer or before it: ten steps or more


class ReadyOrder(DdpEvents):
    """Watches in which order gradients become ready: DDP may be told of a static graph only if it never changes.

    handlers.append(order := ReadyOrder(parameters))
    …                       # some steps: order.step() at the end of each
    order.stop(); order.is_static

    DDP learns a static graph from the first backward pass that begins at what the module has returned. So the graph
    counts as static only if each pass that begins there gives gradients, and each pass that gives gradients begins
    there. `torch.autograd.grad` begins there and gives none; where the module returns an object in which DDP finds no
    tensors for this purpose (a dataclass, for example), or the script takes its loss from elsewhere, the pass begins
    elsewhere.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        watched = list(parameters)
        self._count = len(watched)
        self._now: list[int] = []
        self._steps: list[tuple[int, ...]] = []
        self._in_pass = self._began = self._gave = self._differed = False
        # A frozen parameter has no hook: no step is seen as static then, since it may be thawed later.
        asking = [(number, p) for number, p in enumerate(watched) if p.requires_grad]
        self._handles = [p.register_post_accumulate_grad_hook(self._note(number)) for number, p in asking]

    def _note(self, index: int) -> Callable[[torch.Tensor], None]:
        def ready(_parameter: torch.Tensor) -> None:
            self._now.append(index)
            self._gave = True
            self._watch_pass()

        return ready

    def returned(self, ddp: DDP, what: object) -> object:
        """See `DdpEvents`."""
        if self._handles and torch.is_grad_enabled():
            when_backward_begins(what, self._begins, tensors_of_static_graph)
        return what

    def _begins(self) -> None:
        if self._handles:
            self._began = True
            self._watch_pass()

    def _watch_pass(self) -> None:
        if not self._in_pass:
            self._in_pass = True
            after_this_backward(self._ended)

    def _ended(self) -> None:
        self._differed |= self._began != self._gave
        self._in_pass = self._began = self._gave = False

    def step(self) -> None:
        """A step has ended."""
        self._steps.append(tuple(self._now))
        self._now = []

    def stop(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def is_static(self) -> bool:
        """Whether every gradient became ready once in each full step, always in one order, and DDP can see that.

        It takes three full steps to say so; the first step seen may be a part of one.
        """
        full = self._steps[1:]
        return (
            not self._differed
            and len(full) >= 3
            and len(set(full)) == 1
            and sorted(full[0]) == list(range(self._count))
        )

    @property
    def uses_all(self) -> bool:
        """Whether every gradient became ready in each full step, however often and in whatever order."""
        full = self._steps[1:]
        return len(full) >= 3 and all(set(step) == set(range(self._count)) for step in full)

    @property
    def passes(self) -> int:
        """Backward passes that gave gradients, in the full step with the fewest of them."""
        return min((max(Counter(step).values(), default=0) for step in self._steps[1:]), default=0)


class _BackwardPasses:
    """Calls `_begins` in each backward pass when the first gradient is ready, and `_ended` after it."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._waits = False
        self._handles = [p.register_post_accumulate_grad_hook(self._accumulated) for p in self._parameters]

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if not self._waits:
            self._waits = True
            self._begins(parameter)
            after_this_backward(self._after)

    def _after(self) -> None:
        self._waits = False
        self._ended()

    def _begins(self, first: torch.Tensor) -> None:
        """The pass has already added to the gradient of `first`, and to no other one."""

    def _ended(self) -> None:
        """DDP has reduced what it reduces in this pass."""

    def stop(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._parameters = [], []


_Left = tuple[weakref.ref[torch.Tensor], int, torch.Tensor | None]
"""A gradient, its version, and the sum of its bits; None for a sparse tensor or one of another class.

The reference is weak: `KeepsGradients` and `BucketViews` look for who holds gradients."""


class ByHand(_BackwardPasses):
    """Finds out whether the script itself changes gradients after a backward pass.

    Such a script also reads them there. Watches from its making until `stop()`. Call `reads()` before a function of
    torch reads gradients, since that function may change them too, and `has_read()` when it has ended.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], discarded: Callable[[], None] = lambda: None) -> None:
        super().__init__(parameters)
        self.found = False
        """Whether gradients were not what a backward pass had left, when a function of torch or an optimizer read them
        first, or when the next pass began."""
        self.found_later = False
        """Whether they were not what such a function had left, when another one or an optimizer read them."""
        self.discards = False
        """Whether they were not what a backward pass had left when the next one began, and no function of torch nor an
        optimizer had read them in between; `discarded` is called then, in that pass. Or whether a function of torch was
        the last to read them, and the next pass adds to what it has left."""
        self._discarded = discarded
        self._later = self._has_just_read = False
        self._left: list[tuple[nn.Parameter, _Left]] = []

    @torch.no_grad()
    def _begins(self, first: torch.Tensor) -> None:
        left, self._left = self._left, []
        discarded = any(_is_discarded(p, before, p is first) for p, before in left)
        # What the script does after such a function is its own affair: that function has read what it should.
        if discarded and not self._later:
            self.found = self.discards = True
            self._discarded()
        elif left and not discarded and self._has_just_read:
            self.found = self.discards = True  # it has read, perhaps clipped, what this pass adds to

    def _ended(self) -> None:
        self._later = False
        self._look()

    @torch.no_grad()
    def _look(self) -> None:
        gradients = [(p, p.grad) for p in self._parameters if p.grad is not None]
        self._left = [(p, (weakref.ref(gradient), version_of(gradient), _bits(gradient))) for p, gradient in gradients]

    def reads(self) -> bool:
        """Changes from here until `has_read`, or to the next backward pass, are torch's and not the script's.

        Whether the script has changed gradients since the last backward pass, or since `has_read`.
        """
        left, self._left = self._left, []
        self._has_just_read = False
        changed = any(p.grad is not None and _differs(p.grad, *before) for p, before in left)
        self.found_later |= changed and self._later
        self.found |= changed and not self._later
        return changed

    def has_read(self) -> None:
        """The function of torch has ended."""
        self._later = self._has_just_read = True
        self._look()

    def stop(self) -> None:
        """See `_BackwardPasses`."""
        super().stop()
        self._left = []


def _bits(gradient: torch.Tensor) -> torch.Tensor | None:
    plain = type(gradient) is torch.Tensor and gradient.layout == torch.strided
    return sum_of_bits(gradient) if plain else None


def _differs(now: torch.Tensor, gradient: weakref.ref[torch.Tensor], version: int, bits: torch.Tensor | None) -> bool:
    """Whether a gradient is another one. The version does not count what is done to `p.grad.data`, but bits change."""
    if now is not gradient() or version_of(now) != version:
        return True
    return bits is not None and int(sum_of_bits(now)) != int(bits)


def _is_discarded(parameter: nn.Parameter, before: _Left, has_more: bool) -> bool:
    """Whether a gradient is another one in a backward pass; `has_more`: if the pass has added to it already.

    Where gradients are parts of DDP's buckets, DDP may have moved them to new ones, and those of a bucket have one
    version. So their bits alone say whether they have changed.
    """
    now, (gradient, version, bits) = parameter.grad, before
    if now is None:
        return True
    if has_more:
        return now is not gradient() and base_of(now) is None
    bits_now = _bits(now)
    if bits is None or bits_now is None:
        return now is not gradient() or version_of(now) != version
    return int(bits_now) != int(bits)


class ReadsGradients(_BackwardPasses):
    """Finds out whether the script itself reads gradients, as `p.grad`, before a function of torch has read them.

    Watches from its making until `stop()`. Call `reads()` with what a function of torch is given, before it reads
    gradients; with nothing before an optimizer steps.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters)
        self.found = False
        """Whether the script has read any within a backward pass, or after the last one of a step."""
        self.between = False
        """Whether it has read any between two backward passes of a step."""
        self._own_reads = OwnReads()

    def _begins(self, first: torch.Tensor) -> None:
        self.between |= self._own_reads.has_read()
        self._own_reads.begin(self._parameters)

    def _ended(self) -> None:
        self.found |= self._own_reads.has_read()

    def reads(self, given: Sequence[torch.Tensor]) -> None:
        """What the script reads from here on, until the next backward pass, torch has read before."""
        self.found |= self._own_reads.has_read(given)
        self._own_reads.end()

    def stop(self) -> None:
        """See `_BackwardPasses`."""
        super().stop()
        self._own_reads.end()


class KeepsGradients(_BackwardPasses):
    """Finds out whether the script holds gradients, or other tensors in their memory, over a backward pass.

    It watches DDP without `gradient_as_bucket_view`, where the gradients of each pass have memory of their own.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters)
        self.found = False
        """Whether the script held any when a backward pass began, took hold of one within a pass, or gave one other
        memory (by `p.grad.data = …`)."""
        self._storages: list[tuple[nn.Parameter, weakref.ref[torch.UntypedStorage]]] = []
        self._left: list[weakref.ref[torch.Tensor]] = []
        """The gradient that has each of these storages."""

    def reads(self) -> None:
        """A function of torch is about to read gradients."""
        self.found |= any(
            p.grad is not None and p.grad is gradient() and p.grad.untyped_storage() is not storage()
            for (p, storage), gradient in zip(self._storages, self._left, strict=True)
        )

    def _begins(self, first: torch.Tensor) -> None:
        self.reads()
        outlived = any(
            storage is not None and (p.grad is None or p.grad.untyped_storage() is not storage)
            for p, storage in ((p, reference()) for p, reference in self._storages)
        )
        self._storages, self._left = [], []
        self.found |= outlived or held_elsewhere(_gradients_of(p for p in self._parameters if p is not first))

    def _ended(self) -> None:
        self.found |= held_elsewhere(_gradients_of(self._parameters))
        of_all = [p for p in self._parameters if p.grad is not None and _has_storage(p.grad)]
        self._storages = [(p, weakref.ref(p.grad.untyped_storage())) for p in of_all if p.grad is not None]
        self._left = [weakref.ref(p.grad) for p in of_all if p.grad is not None]


def _gradients_of(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None and _has_storage(p.grad)]


def _has_storage(gradient: torch.Tensor) -> bool:
    """Sparse gradients have none; DDP puts them into no bucket."""
    return gradient.layout is torch.strided


class FirstSteps(DdpEvents):
    """Ends `deferred` or `accumulation` where the real job is not one whose reductions may be put off."""

    def __init__(
        self,
        wrapped: Callable[[], Sequence[Wrapped]],
        implicit_no_sync: ImplicitNoSync,
        accumulation: Accumulation,
        warn: Callable[[str], None],
    ) -> None:
        self._wrapped, self._implicit_no_sync, self._accumulation = wrapped, implicit_no_sync, accumulation
        self._warn = warn
        self._by_hand: ByHand | None = None
        self._reads_gradients: ReadsGradients | None = None
        self._left = _READS
        self._built = 0
        """Models; a new DDP object around the same parameters is none."""
        self._model: Model | None = None
        self._was_put_off = False
        """Whether there were gradients that were not reduced when the present forward pass began."""

    def built(self, wrapped: Wrapped) -> None:
        """Put nothing off any more if the script builds several DDP models, or one that cannot wait for reductions.

        One of several may step while another one's backward pass is yet to come. Models that the script has dropped
        count too, because each rank's garbage collector frees them at another time.
        """
        self._built += wrapped.model is not self._model
        self._model = wrapped.model
        if wrapped.is_sparse and self._accumulation.leave_out():
            self._say(ACCUMULATE_STEPS.name, SPARSE)
        if self._built > 1:
            self._end("there are several DDP models")
        elif any(w.arguments.get("find_unused_parameters") for w in self._wrapped()):
            self._end(FINDS_UNUSED)
        elif wrapped.is_sparse:
            self._end(SPARSE)

    def script_captures(self, ddp: DDP) -> None:
        """See `DdpEvents`. The graph would repeat one pass of several, with or without its reduction, for ever."""
        self._put_nothing_off(CAPTURES)

    def script_registered(self, wrapped: Wrapped) -> None:
        """See `DdpEvents`. What the hook makes may depend on how often it is called; what it leaves out stays so."""
        self._put_nothing_off(OWN_HOOK)

    def _put_nothing_off(self, why: str) -> None:
        """From now on. RuntimeError where something was put off in the present step."""
        if self._implicit_no_sync.pending:
            raise left_unreduced(why, DEFER_REDUCTIONS.name)
        if self._accumulation.steps > 1 and self._accumulation.in_step:
            raise left_unreduced(why, ACCUMULATE_STEPS.name)
        if self._accumulation.leave_out():
            self._say(ACCUMULATE_STEPS.name, why)
        self._end(why)
        self._implicit_no_sync.end()

    def forward_begins(self, ddp: DDP) -> None:
        """Begin to watch, if reductions are put off."""
        self._was_put_off = self._implicit_no_sync.pending
        if self._by_hand is None and self._left and (self._implicit_no_sync.every > 1 or self._accumulation.steps > 1):
            parameters = parameters_of(self._wrapped())
            self._by_hand = ByHand(parameters, self._discarded)
            self._reads_gradients = ReadsGradients(parameters)
            self._implicit_no_sync.reads, self._implicit_no_sync.has_read = self._reads, self._by_hand.has_read

    def _reads(self, given: Sequence[torch.Tensor]) -> None:
        assert self._by_hand is not None
        assert self._reads_gradients is not None
        changed = self._by_hand.reads()
        self._reads_gradients.reads(given)
        self._left -= 1
        # `ImplicitNoSync` itself sees what is read where it has put a reduction off.
        if self._reads_gradients.between and self._accumulation.makes_several_one():
            raise left_unreduced(DISCARDS_GRADIENTS, ACCUMULATE_STEPS.name)
        # `Accumulation` itself sees what is thrown away between two passes: that has not been used.
        if changed and self._accumulation.makes_several_one():
            raise left_unreduced(CHANGES_GRADIENTS, ACCUMULATE_STEPS.name)
        if self._by_hand.found:
            why = DISCARDS_GRADIENTS if self._by_hand.discards else CHANGES_GRADIENTS
            if self._implicit_no_sync.pending:
                raise left_unreduced(why, DEFER_REDUCTIONS.name)
            self._end(why)
        if not self._left:
            self._stop()

    def _discarded(self) -> None:
        if not self._was_put_off:
            return
        # The script may have kept what it has cleared, if it has read it.
        if self._implicit_no_sync.was_read():
            raise left_unreduced(DISCARDS_GRADIENTS, DEFER_REDUCTIONS.name)
        # Nobody misses what was not even read, as where an epoch ends with fewer backward passes than make a step.
        assert self._by_hand is not None
        self._by_hand.found = self._by_hand.discards = False

    def _end(self, why: str) -> None:
        """Put off nothing within a step from now on."""
        if self._implicit_no_sync.every > 1:
            self._implicit_no_sync.end()
            self._say(DEFER_REDUCTIONS.name, why)
        if self._accumulation.steps == 1:
            self._stop()

    def _say(self, knob: str, why: str) -> None:
        self._warn(f"the recipe's {knob} is left out: {why}")

    def _stop(self) -> None:
        self._left = 0
        self._implicit_no_sync.reads, self._implicit_no_sync.has_read = lambda _given: None, lambda: None
        if self._by_hand is not None:
            self._by_hand.stop()
        if self._reads_gradients is not None:
            self._reads_gradients.stop()
