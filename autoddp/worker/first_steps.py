"""What a script's first steps show of its gradients: their order, who else changes them, whether reductions may wait.

A tuning job asks before it offers `static_graph`, `defer_reductions` and `accumulate_steps`. A recipe is bound to the
model and not to the loop around it, which may have changed since, or be another script's: so the real job asks again
(`FirstSteps`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs.job import SPARSE
from autoddp.knobs.micro_batches import ACCUMULATE_STEPS, CHANGES_GRADIENTS, DEFER_REDUCTIONS, FINDS_UNUSED
from autoddp.worker.accumulation import Accumulation
from autoddp.worker.ddp import DdpEvents, Wrapped, after_this_backward, version_of
from autoddp.worker.gradient_access import parameters_of
from autoddp.worker.guard import sum_of_bits
from autoddp.worker.implicit_no_sync import ImplicitNoSync
from autoddp.worker.sync_switch import left_unreduced

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


_Left = tuple[torch.Tensor, int, torch.Tensor | None]
"""A gradient, its version, and the sum of its bits; None for a sparse tensor or one of another class."""


class ByHand:
    """Finds out whether the script changes gradients itself between a backward pass and the optimizer's step.

    Such a script also reads them there. Watches from its making until `stop()`. Call `reads()` before a function of
    torch reads gradients, since that function may change them too, and `has_read()` when it has ended.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.found = False
        """Whether gradients were not what a backward pass had left, when a function of torch or an optimizer read them
        first."""
        self.found_later = False
        """Whether they were not what such a function had left."""
        self._parameters = [p for p in parameters if p.requires_grad]
        self._waits = self._later = False
        self._left: list[tuple[nn.Parameter, _Left]] = []
        self._handles = [p.register_post_accumulate_grad_hook(self._accumulated) for p in self._parameters]

    def _accumulated(self, _parameter: torch.Tensor) -> None:
        if not self._waits:
            self._waits = True
            after_this_backward(self._ended)

    def _ended(self) -> None:
        self._waits = self._later = False
        self._look()

    @torch.no_grad()
    def _look(self) -> None:
        gradients = [(p, p.grad) for p in self._parameters if p.grad is not None]
        self._left = [(p, (gradient, version_of(gradient), _bits(gradient))) for p, gradient in gradients]

    def reads(self) -> None:
        """Changes from here until `has_read`, or to the next backward pass, are torch's and not the script's."""
        left, self._left = self._left, []
        if any(p.grad is not None and _differs(p.grad, *before) for p, before in left):
            self.found_later |= self._later
            self.found |= not self._later

    def has_read(self) -> None:
        """The function of torch has ended."""
        self._later = True
        self._look()

    def stop(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._left, self._parameters = [], [], []


def _bits(gradient: torch.Tensor) -> torch.Tensor | None:
    plain = type(gradient) is torch.Tensor and gradient.layout == torch.strided
    return sum_of_bits(gradient) if plain else None


def _differs(now: torch.Tensor, gradient: torch.Tensor, version: int, bits: torch.Tensor | None) -> bool:
    """Whether a gradient is another one. The version does not count what is done to `p.grad.data`, but bits change."""
    if now is not gradient or version_of(now) != version:
        return True
    return bits is not None and int(sum_of_bits(now)) != int(bits)


class FirstSteps(DdpEvents):
    """Ends `implicit_no_sync` or `accumulation` where the real job is not one whose reductions may be put off."""

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
        self._left = _READS
        self._built = 0

    def built(self, wrapped: Wrapped) -> None:
        """Of several DDP objects, one may step while another one's backward pass is yet to come.

        Models that the script has dropped count too, because each rank's garbage collector frees them at another time.
        """
        self._built += 1
        if wrapped.is_sparse and self._accumulation.leave_out():
            self._say(ACCUMULATE_STEPS.name, SPARSE)
        if self._built > 1:
            self._end("there are several DDP models")
        elif any(w.arguments.get("find_unused_parameters") for w in self._wrapped()):
            self._end(FINDS_UNUSED)
        elif wrapped.is_sparse:
            self._end(SPARSE)

    def forward_begins(self, ddp: DDP) -> None:
        """Begin to watch, if reductions are put off."""
        if self._by_hand is None and self._left and (self._implicit_no_sync.every > 1 or self._accumulation.steps > 1):
            self._by_hand = ByHand(parameters_of(self._wrapped()))
            self._implicit_no_sync.reads, self._implicit_no_sync.has_read = self._reads, self._by_hand.has_read

    def _reads(self) -> None:
        assert self._by_hand is not None
        self._by_hand.reads()
        self._left -= 1
        found = self._by_hand.found
        if (found or self._by_hand.found_later) and self._accumulation.keeps_on():
            raise left_unreduced(CHANGES_GRADIENTS, ACCUMULATE_STEPS.name)
        if found and self._implicit_no_sync.pending:
            raise left_unreduced(CHANGES_GRADIENTS, DEFER_REDUCTIONS.name)
        if found:
            self._end(CHANGES_GRADIENTS)
        elif not self._left:
            self._stop()

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
        self._implicit_no_sync.reads = self._implicit_no_sync.has_read = lambda: None
        if self._by_hand is not None:
            self._by_hand.stop()
