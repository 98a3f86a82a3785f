"""Makes one optimizer step of several steps of the script: all but the last keep their gradients for the last one.

The script still calls whatever it calls. Until the last of the steps its optimizer finds no gradients and so does
nothing, `zero_grad` leaves the kept gradients alone, clipping only tells their norm and the gradient scaler waits. In
the last step DDP reduces the sum of all gradients, which is divided by their number before anything reads it.

Learning-rate schedulers go on with every step of the script: the rate stays a function of the samples seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import Optimizer

from autoddp.knobs import Configuration
from autoddp.knobs.ddp_arguments import KEEPS_GRADIENTS
from autoddp.knobs.micro_batches import ACCUMULATE_STEPS, DISCARDS_GRADIENTS
from autoddp.worker.bucket_views import are_held
from autoddp.worker.ddp import DdpEvents, Wrapped, is_joining, must_reduce, version_of
from autoddp.worker.effect import Effect
from autoddp.worker.gradient_access import GradientHandler, are_reduced, held_by, ids_of, parameters_of
from autoddp.worker.implicit_no_sync import ImplicitNoSync
from autoddp.worker.sync_switch import ReductionSwitch, StillThere

_LOOKS = 20  # steps that are kept, in which the script may be seen to hold gradients


class Accumulation(Effect, DdpEvents, GradientHandler):
    """Add it as a handler of gradients after `implicit_no_sync`, tell it of each forward pass, and set `steps`.

    `gives_up(why)` is called when the script turns out to do what cannot be done with several steps in one. `why_not()`
    is asked after a backward pass, before its gradients are kept for a later step: why they must not be.
    """

    def __init__(
        self,
        switch: ReductionSwitch,
        wrapped: Callable[[], Sequence[Wrapped]],
        implicit_no_sync: ImplicitNoSync,
        gives_up: Callable[[str], None],
        why_not: Callable[[], str] = lambda: "",
    ) -> None:
        self._switch, self._wrapped, self._implicit_no_sync = switch, wrapped, implicit_no_sync
        self._gives_up, self._why_not = gives_up, why_not
        self._steps = 1
        self._thrown_away = 0
        """How often the script has thrown away what was kept, since the last of several steps."""
        self._looks = _LOOKS
        self._unchanged = StillThere(ACCUMULATE_STEPS.name)
        self._aside: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._start_over()
        self.clears = False
        """Whether the script has called `zero_grad` of what DDP reduces: kept gradients can be protected from it."""
        self._stepped: set[bool] = set()  # by optimizers that hold some of what DDP reduces: do they hold all?

    def _start_over(self) -> None:
        self._kept = 0  # steps of the script whose gradients are part of the present ones
        # Gradients as last kept, with their version. References are weak: `BucketViews` looks for who holds gradients.
        self._seen: dict[nn.Parameter, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._holding = self._averaged = False
        self._checks = True
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
        self._steps, self._thrown_away = count, 0

    @property
    def _holds(self) -> bool:
        """Whether the script's present step is not the last of its kind."""
        return self._kept < self._steps - 1

    def _keeps(self) -> bool:
        """The same, asked after a backward pass. Where it must not be, what was put off is reduced here."""
        if self._holds and self._why_not():
            self.stop()
        return self._holds

    def stop(self) -> None:
        """Each step of the script is one again; all ranks call it at the same place."""
        if self._steps > 1:
            self.steps = 1
            self._implicit_no_sync.owe()

    def built(self, wrapped: Wrapped) -> None:
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

    def forward_begins(self, ddp: DDP) -> None:
        """A forward pass is about to run; what is decided here holds for its backward pass."""
        checks, self._checks = self._checks, self._holds  # a pass that reduces may put the gradients into buckets
        if checks and any(p.grad is None or p.grad is not kept() for p, (kept, _) in self._seen.items()):
            self._give_up("the script clears gradients without zero_grad")
        if self._steps > 1 and is_joining(ddp):
            self._give_up("the script uses join()")
        if self._holds and torch.is_grad_enabled() and self._switch.reduces(ddp):
            self._unchanged.check()
            self._unchanged.begin(self._parameters)
            # To reduce what is equal on all ranks again changes nothing: the mean of equal parts is that part.
            self._switch.put_off = not must_reduce(ddp)

    def before_reading(self, parameters: Sequence[torch.Tensor]) -> bool:
        """See `GradientHandler`."""
        if self._steps == 1 or not are_reduced(parameters, self._wrapped()):
            return False
        if not self._keeps():
            self._average()
        return self._holds

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Average the gradients in the last step; put them aside in the others."""
        held = ids_of(held_by(optimizer))
        of_it = [id(p) in held for p in self._parameters if p.requires_grad or id(p) in held]
        if not any(of_it):
            return
        self._stepped.add(all(of_it))
        if self._steps == 1:
            return
        if has_closure:
            return self._give_up("the optimizer runs backward itself (a closure)")
        if not all(of_it):
            self._give_up("no one optimizer steps all that DDP reduces")
            return self._implicit_no_sync.owe()
        self._holding = self._keeps()
        if not self._holding:
            return self._average()
        self._look_for_holders()
        self._aside = [(p, p.grad) for p in self._parameters if p.grad is not None]
        for p, _ in self._aside:
            p.grad = None

    def after_step(self, optimizer: Optimizer) -> None:
        """Put the gradients back that were aside."""
        if self._steps == 1 or not are_reduced(held_by(optimizer), self._wrapped()):
            return
        if not self._holding:
            return self._start_over()
        self._put_back()
        if self._thrown_away > 1:
            # A script that clears gradients between two backward passes of each step would never make a last step.
            # This step was to be kept too, so nothing that is not reduced has been used.
            self._give_up(DISCARDS_GRADIENTS)
            return self._implicit_no_sync.owe()
        self._kept, self._checks = self._kept + 1, True
        self._seen = {p: (weakref.ref(p.grad), version_of(p.grad)) for p in self._parameters if p.grad is not None}

    def step_skipped(self, optimizer: Optimizer) -> None:
        """See `GradientHandler`."""
        if are_reduced(held_by(optimizer), self._wrapped()):
            self._start_over()

    def keeps(self, parameters: Sequence[torch.Tensor]) -> bool:
        """See `GradientHandler`. Gradients to which a backward pass has added are thrown away with what was kept."""
        if not are_reduced(parameters, self._wrapped()):
            return False
        self.clears = True
        has_more = any(
            p.grad is None or p.grad is not kept() or version_of(p.grad) != version
            for p, (kept, version) in self._seen.items()
        )
        if self._kept and not has_more:
            return True
        self._thrown_away += bool(self._kept)
        self._start_over()
        return False

    def keeps_scale(self) -> bool:
        """What is kept is scaled by the present scale."""
        return self._holding

    def _look_for_holders(self) -> None:
        """Stop the job if the script holds gradients that are kept: they are not reduced, and more is added to them.

        One rank alone may hold some, so the ranks cannot all make single steps again.
        """
        if not self._looks:
            return
        self._looks -= 1
        if are_held([p.grad for p in self._parameters if p.grad is not None]):
            raise RuntimeError(
                f"autoddp: {KEEPS_GRADIENTS}, where {ACCUMULATE_STEPS.name} makes several steps one: the job stops; "
                "launch it without the recipe (--trials 0), or tune again (--trials 20)"
            )

    def _put_back(self) -> None:
        for p, gradient in self._aside:
            p.grad = gradient
        self._aside = []

    def _give_up(self, why: str) -> None:
        self.steps = 1
        self._gives_up(why)

    @torch.no_grad()
    def _average(self) -> None:
        """Divide the sum over the steps, which DDP has reduced by now, by their number; once."""
        self._thrown_away = 0
        if self._averaged or not self._kept:
            return
        self._averaged = True
        for p in self._parameters:
            if p.grad is not None:
                p.grad.div_(self._kept + 1)

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return parameters_of(self._wrapped())
