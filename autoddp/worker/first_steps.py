"""What a script's first steps show of its gradients: their order, who changes or holds them, whether they may wait.

A tuning job asks before it offers `static_graph`, `defer_reductions` and `gradient_as_bucket_view`. A recipe is bound
to the model and not to the loop around it, which may have changed since, or be another script's: so the real job asks
again (`FirstSteps`, `bucket_views.BucketViews`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs.micro_batches import CHANGES_GRADIENTS, DEFER_REDUCTIONS, DISCARDS_GRADIENTS, FINDS_UNUSED
from autoddp.worker.bucket_views import held_elsewhere
from autoddp.worker.ddp import DdpEvents, Wrapped, after_this_backward, version_of
from autoddp.worker.gradient_access import parameters_of
from autoddp.worker.implicit_no_sync import ImplicitNoSync

_READS = 20  # of gradients, by an optimizer or before it: ten steps or more


class ReadyOrder:
    """Watches in which order gradients become ready: DDP may be told of a static graph only if it never changes.

    order = ReadyOrder(parameters)
    …                       # some steps, order.step() at the end of each
    order.stop(); order.is_static
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        watched = list(parameters)
        self._count = len(watched)
        self._now: list[int] = []
        self._steps: list[tuple[int, ...]] = []
        # A frozen parameter has no hook: no step is seen as static then, since it may be thawed later.
        asking = [(number, p) for number, p in enumerate(watched) if p.requires_grad]
        self._handles = [p.register_post_accumulate_grad_hook(self._note(number)) for number, p in asking]

    def _note(self, index: int) -> Callable[[torch.Tensor], None]:
        return lambda _parameter: self._now.append(index)

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
        """Whether every gradient became ready once in each full step, always in one order.

        It takes three full steps to say so; the first step seen may be a part of one.
        """
        full = self._steps[1:]
        return len(full) >= 3 and len(set(full)) == 1 and sorted(full[0]) == list(range(self._count))

    @property
    def uses_all(self) -> bool:
        """Whether every gradient became ready in each full step, however often and in whatever order."""
        full = self._steps[1:]
        return len(full) >= 3 and all(set(step) == set(range(self._count)) for step in full)


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


class ByHand(_BackwardPasses):
    """Finds out whether the script itself changes gradients after a backward pass.

    Such a script also reads them there. Watches from its making until `stop()`; call `reads()` before any function of
    torch reads gradients, since that function may change them too.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], discarded: Callable[[], None] = lambda: None) -> None:
        super().__init__(parameters)
        self.found = False
        """Whether gradients were not what a backward pass had left."""
        self.discards = False
        """Whether that was so when the next backward pass began: the script cleared them before any optimizer stepped.
        `discarded` is called then, in that pass."""
        self._discarded = discarded
        self._left: list[tuple[nn.Parameter, weakref.ref[torch.Tensor], int]] = []

    def _begins(self, first: torch.Tensor) -> None:
        left, self._left = self._left, []
        if any(p.grad is not gradient() or (p is not first and _differs(p, version)) for p, gradient, version in left):
            self.found = self.discards = True
            self._discarded()

    def _ended(self) -> None:
        self._left = [(p, weakref.ref(p.grad), version_of(p.grad)) for p in self._parameters if p.grad is not None]

    def reads(self) -> None:
        """Changes from here to the next backward pass are torch's and not the script's."""
        left, self._left = self._left, []
        for p, gradient, version in left:
            if p.grad is not None and (p.grad is not gradient() or _differs(p, version)):
                self.found = True

    def stop(self) -> None:
        """See `_BackwardPasses`."""
        super().stop()
        self._left = []


def _differs(parameter: nn.Parameter, version: int) -> bool:
    return parameter.grad is None or version_of(parameter.grad) != version


class KeepsGradients(_BackwardPasses):
    """Finds out whether the script holds gradients, or other tensors in their memory, over a backward pass.

    It watches DDP without `gradient_as_bucket_view`, where the gradients of each pass have memory of their own.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters)
        self.found = False
        """Whether the script held any when a backward pass began, or took hold of one within a pass."""
        self._storages: list[tuple[nn.Parameter, weakref.ref[torch.UntypedStorage]]] = []

    def _begins(self, first: torch.Tensor) -> None:
        outlived = any(
            storage is not None and (p.grad is None or p.grad.untyped_storage() is not storage)
            for p, storage in ((p, reference()) for p, reference in self._storages)
        )
        self._storages = []
        self.found |= outlived or held_elsewhere(_gradients_of(p for p in self._parameters if p is not first))

    def _ended(self) -> None:
        self.found |= held_elsewhere(_gradients_of(self._parameters))
        of_all = ((p, p.grad) for p in self._parameters)
        self._storages = [(p, weakref.ref(g.untyped_storage())) for p, g in of_all if g is not None and _has_storage(g)]


def _gradients_of(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None and _has_storage(p.grad)]


def _has_storage(gradient: torch.Tensor) -> bool:
    """Sparse gradients have none; DDP puts them into no bucket."""
    return gradient.layout is torch.strided


class FirstSteps(DdpEvents):
    """Ends `implicit_no_sync` and warns where the real job is not one whose reductions may be put off."""

    def __init__(
        self, wrapped: Callable[[], Sequence[Wrapped]], implicit_no_sync: ImplicitNoSync, warn: Callable[[str], None]
    ) -> None:
        self._wrapped, self._implicit_no_sync, self._warn = wrapped, implicit_no_sync, warn
        self._by_hand: ByHand | None = None
        self._left = _READS
        self._built = 0
        self._was_put_off = False
        """Whether there were gradients that were not reduced when the present forward pass began."""

    def built(self, wrapped: Wrapped) -> None:
        """Of several DDP objects, one may step while another one's backward pass is yet to come.

        Models that the script has dropped count too, because each rank's garbage collector frees them at another time.
        """
        self._built += 1
        if self._built > 1:
            self._end("there are several DDP models")
        elif any(w.arguments.get("find_unused_parameters") for w in self._wrapped()):
            self._end(FINDS_UNUSED)

    def forward_begins(self, ddp: DDP) -> None:
        """Begin to watch, if reductions are put off."""
        self._was_put_off = self._implicit_no_sync.pending
        if self._by_hand is None and self._left and self._implicit_no_sync.every > 1:
            self._by_hand = ByHand(parameters_of(self._wrapped()), self._discarded)
            self._implicit_no_sync.reads = self._reads

    def _reads(self) -> None:
        assert self._by_hand is not None
        self._by_hand.reads()
        self._left -= 1
        if self._by_hand.found:
            if self._implicit_no_sync.pending:
                raise _stop(CHANGES_GRADIENTS)
            self._end(CHANGES_GRADIENTS)
        elif not self._left:
            self._stop()

    def _discarded(self) -> None:
        # The script may have kept what it has cleared.
        if self._was_put_off:
            raise _stop(DISCARDS_GRADIENTS)

    def _end(self, why: str) -> None:
        if self._implicit_no_sync.every > 1:
            self._implicit_no_sync.end()
            self._warn(f"the recipe's {DEFER_REDUCTIONS.name} is left out: {why}")
        self._stop()

    def _stop(self) -> None:
        self._left = 0
        self._implicit_no_sync.reads = lambda: None
        if self._by_hand is not None:
            self._by_hand.stop()


def _stop(why: str) -> RuntimeError:
    return RuntimeError(
        f"autoddp: {why}, which the recipe's {DEFER_REDUCTIONS.name} has left unreduced: the job stops; launch it "
        "without the recipe (--trials 0), or tune again (--trials 20)"
    )
