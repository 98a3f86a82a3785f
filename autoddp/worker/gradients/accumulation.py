"""Makes one optimizer step of several steps of the script: all but the last keep their gradients for the last one.

The script still calls whatever it calls. Each of its steps is in one of three states:

State  | When                          | Backward pass  | Clipping, a scaler    | The optimizer's step | zero_grad
-------|-------------------------------|----------------|-----------------------|----------------------|-----------------
SINGLE | one step is one, nothing kept | as written     | as written            | as written           | as written
KEPT   | more steps must follow        | does not       | only tell the norm,   | finds no gradients,  | leaves alone
       |                               | reduce         | the scaler waits      | so does nothing      | what was kept
LAST   | no more have to follow        | reduces the    | first the sum is      | first the sum is     | as written, and
       |                               | whole sum      | averaged              | averaged             | all starts over

Learning-rate schedulers go on with every step of the script: the rate stays a function of the samples seen.

Some scripts do what cannot be done with several steps in one. If that is seen before it does harm, the script's present
step becomes the LAST one, with the mean of what was kept, and each later one is SINGLE. If it is seen too late, the job
stops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import Optimizer

from autoddp.knobs import Configuration
from autoddp.knobs.ddp_arguments import KEEPS_GRADIENTS
from autoddp.knobs.micro_batches import (
    ACCUMULATE_STEPS,
    CHANGES_GRADIENTS,
    DISCARDS_GRADIENTS,
    STEPS_OTHERS,
    STEPS_WITHOUT_GRADIENTS,
)
from autoddp.worker.ddp.backward import when_backward_begins
from autoddp.worker.ddp.handlers import DdpEvents
from autoddp.worker.ddp.private import is_joining, must_reduce
from autoddp.worker.ddp.wrapped import Wrapped
from autoddp.worker.effects.base import Effect
from autoddp.worker.gradients.access import GradientHandler, OwnReads, are_reduced, held_by, ids_of, parameters_of
from autoddp.worker.gradients.deferred import ImplicitNoSync
from autoddp.worker.gradients.equal_parameters import checksum, sum_of_bits
from autoddp.worker.gradients.kept import KeptGradients
from autoddp.worker.gradients.optimizers import Held, Optimizers
from autoddp.worker.gradients.same_on_all import Norms, all_throw_away
from autoddp.worker.gradients.switch import ReductionSwitch, StillThere, left_unreduced
from autoddp.worker.gradients.views import are_held

_LOOKS = 20  # steps that are kept, in which it may be seen that the script holds gradients, or steps without them


class Accumulation(Effect, DdpEvents, GradientHandler):
    """Add it as a handler of gradients after `deferred`, tell it of each forward pass, and set `steps`.

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
        self._kept, self._optimizers = KeptGradients(self._parameters), Optimizers(self._parameters)
        self._norms, self._unchanged = Norms(), StillThere(ACCUMULATE_STEPS.name)
        self._steps = 1
        self._local: dict[DDP, Wrapped] = {}
        """Objects whose gradients are this rank's own: their reduction was put off. They are kept alive, because each
        rank's garbage collector frees what the script drops at another time, and all ranks must reduce the same."""
        self.in_step = False
        """Whether a backward pass of a model has begun since the script's last step."""
        self._trains = False
        """Whether one was called for training since the script has begun."""
        self._left_out = False
        """Whether clipping or unscaling was left out in the present step, which nothing can make up for."""
        self._scaler_waits = False
        """Whether clipping or unscaling was left out since the last forward pass, even if the step is thrown away."""
        self._inside = 0
        """Optimizers that are stepping: one may step by another one that holds the same parameters."""
        self._steps_kept = False
        """Whether the optimizer that steps, or has stepped last, finds no gradients."""
        self._has_updated = False
        """Whether an optimizer step was made with gradients."""
        self._ended = 0
        """Steps that were made or thrown away: at the same place of the script as many on all ranks."""
        self._thrown_away = 0
        """How often the script has thrown away what was kept, since the last of several steps."""
        self._looks = _LOOKS
        self._read: list[tuple[nn.Parameter, torch.Tensor]] = []
        """Sums of the bits of gradients, as a function of torch has left them that was to change them."""
        self._given: frozenset[int] = frozenset()
        """Identities of what that function was given: parameters or gradients."""
        self._own_reads = OwnReads()  # after such a function
        self._before = ""
        """Checksum of the parameters, where the optimizer must not change them; "" where nothing is compared."""
        self.clears = False
        """Whether the script has called `zero_grad` of what DDP reduces: kept gradients can be protected from it."""

    def _parameters(self) -> list[nn.Parameter]:
        return parameters_of(self._wrapped())

    # The states

    @property
    def steps(self) -> int:
        """Number of the script's steps that make one optimizer step: 1 as written."""
        return self._steps

    @steps.setter
    def steps(self, count: int) -> None:
        """Set the number, at a step boundary. What was kept is left to the script, unreduced."""
        self._kept.put_back()
        self._start_over()
        self._begin_step()
        self._local, self._inside = {}, 0
        self._steps, self._thrown_away = count, 0

    def apply(self, configuration: Configuration) -> None:
        """See `Effect`."""
        self.steps = configuration.steps_per_update

    @property
    def _is_single(self) -> bool:
        """Whether each step of the script is an optimizer step, and nothing is kept of steps before."""
        return self._steps == 1 and not self._kept.steps and not self._local

    @property
    def _more_must_follow(self) -> bool:
        """Whether the present optimizer step needs further steps of the script after the present one."""
        return self._kept.steps < self._steps - 1

    def makes_several_one(self) -> bool:
        """Whether several steps are still to be one, asked after a backward pass and before its gradients are kept."""
        if self._more_must_follow and self._why_not():
            self.stop()
        return self._steps > 1

    def _is_to_be_kept(self) -> bool:
        """Whether the present step is to be kept, asked at the same moment."""
        return self.makes_several_one() and self._more_must_follow

    def _begin_step(self) -> None:
        self.in_step = self._left_out = False
        self._own_reads.end()

    def _start_over(self) -> None:
        """Nothing is kept any more."""
        self._kept.start_over()
        self._steps_kept = False
        self._unchanged.end()

    def stop(self) -> None:
        """Make the script's present step end the optimizer step, and each later one an optimizer step of its own.

        All ranks call it at the same place. What was put off is reduced before it is read.
        """
        self._kept.put_back()
        self._steps, self._steps_kept, self._inside, self._scaler_waits = 1, False, 0, False
        self._unchanged.end()

    def leave_out(self) -> bool:
        """Make each step one of its own, and tell whether any was not; call it outside of backward passes.

        What was kept is thrown away, as at the end of a run, if the script is not in the middle of a step. If it has
        just built a model, it may train that one next, and drop the old one. Each rank's garbage collector frees the
        old model at another time, so ranks could disagree on which gradients there are.
        """
        if self._steps == 1:
            return False
        if self.in_step:
            self.stop()
        else:
            self._kept.throw_away()
            self.steps = 1
        return True

    # What the script's optimizers hold

    def given(self, optimizer: Optimizer) -> None:
        """See `GradientHandler`."""
        self._optimizers.given(optimizer)

    @property
    def one_optimizer(self) -> bool:
        """Whether all that DDP reduces has been stepped by one optimizer, so far."""
        return self._optimizers.are_one

    @property
    def steps_others(self) -> bool:
        """Whether an optimizer steps what no DDP object reduces: beside what one reduces, or since one is trained."""
        return self._optimizers.step_others

    # A step of the script, from its forward pass to `zero_grad`

    def built(self, wrapped: Wrapped) -> None:
        """The script has built a DDP model. After its first steps, each of its steps is one again."""
        if self._optimizers.have_stepped and self.leave_out():
            self._gives_up("the script builds another model")

    def forward_begins(self, ddp: DDP) -> None:
        """A forward pass is about to run; what is decided here holds for its backward pass."""
        self._inside, self._read, self._scaler_waits = 0, [], False
        self._own_reads.end()
        self._optimizers.look()
        # A script that clears gradients between two backward passes of each step would never make a last step. It may
        # have read those of its own rank, so not before the step is over, in which its optimizer has done nothing.
        if self._thrown_away > 1 and not self.in_step and self.leave_out():
            self._gives_up(DISCARDS_GRADIENTS)
        if self._kept.were_cleared:
            self._start_over()
            self._end("the script clears gradients without zero_grad")
        if is_joining(ddp):
            self._end("the script uses join()")
        if self._optimizers.hold_others:
            self._end(STEPS_OTHERS)
        if torch.is_grad_enabled():
            self._kept.sum_again()
        if torch.is_grad_enabled() and self._switch.as_written(ddp):
            self._trains = True
            if self._switch.reduces(ddp):
                self._put_off(ddp)

    def returned(self, ddp: DDP, what: Any) -> Any:
        """See `DdpEvents`. One rank alone may run a forward pass, to log or to evaluate, but no backward pass."""
        begins = not self.in_step and torch.is_grad_enabled() and self._switch.as_written(ddp)
        if begins and not when_backward_begins(what, self._goes_backward):
            self._goes_backward()  # the gradients may come from an object in which DDP finds no tensors
        return what

    def _goes_backward(self) -> None:
        self.in_step = True

    def _end(self, why: str) -> None:
        """Stop, in a forward pass."""
        if self._steps > 1:
            self.stop()
            self._gives_up(why)

    def _put_off(self, ddp: DDP) -> None:
        """Leave the reduction of the pass that begins to a later step, if this one is kept."""
        self._local.pop(ddp, None)
        # To reduce what is equal on all ranks again changes nothing: the mean of equal parts is that part.
        if must_reduce(ddp) or not self._more_must_follow:
            self._kept.may_move()
        if not self._more_must_follow:
            return
        # Once a torch optimizer has stepped, what the script changes itself is made of something else.
        if not self._kept.steps:
            self._unchanged.check()
        self._unchanged.begin(self._parameters())
        if not must_reduce(ddp):
            self._switch.put_off = True
            self._local[ddp] = next(wrapped for wrapped in self._wrapped() if wrapped.ddp is ddp)

    def before_reading(self, parameters: Sequence[torch.Tensor]) -> bool:
        """See `GradientHandler`."""
        if self._is_single or not are_reduced(parameters, self._wrapped()):
            return False
        if self._is_to_be_kept():
            self._left_out, self._scaler_waits, self._given = True, True, ids_of(parameters)
            self._stop_if_changed()
            return True
        self._average()
        return False

    def after_reading(self) -> None:
        """See `GradientHandler`."""
        if self._left_out:
            self._own_reads.begin(self._parameters())
        if self._left_out and self._looks:
            given = self._given
            self._read = [
                (p, sum_of_bits(p.grad))
                for p in self._parameters()
                if p.grad is not None and not given.isdisjoint((id(p), id(p.grad)))
            ]

    def norm_read(self, function: str, parameters: Sequence[torch.Tensor], norm: torch.Tensor) -> torch.Tensor:
        """See `GradientHandler`. In a step that is kept, the norm of the last step in which it was that of all ranks.

        The norm of a kept step is this rank's own. A script that leaves out a step by its norm, or clips by the norms
        so far, would decide otherwise on each rank.
        """
        wrapped = self._wrapped()
        if self._steps == 1 or not are_reduced(parameters, wrapped):
            return norm
        given, reduced = ids_of(parameters), self._parameters()
        places = (n for n, p in enumerate(reduced) if id(p) in given or id(p.grad) in given)
        which = f"{function} {next(places, 0)} {len(parameters)}"
        if not (self._left_out and self._more_must_follow):
            return self._norms.of_all(which, norm)
        return self._norms.last(which, norm, next(w.ddp for w in wrapped if w.ddp is not None))

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Average the gradients in the last step; put them aside in the others."""
        held = self._optimizers.about_to_step(optimizer, self._trains)
        if not held.some:
            if held.others and self._steps > 1 and self._trains and not self._has_updated and self.makes_several_one():
                # It may have made its gradients from those that are not reduced, as optimizers with copies in
                # another precision do. Later on, one rank alone may train another model for an evaluation.
                raise left_unreduced(STEPS_OTHERS, ACCUMULATE_STEPS.name)
            return
        if self._is_single:
            return
        self._give_up_if_impossible(held, has_closure)
        self._inside += 1
        if self._inside > 1:
            return
        self._steps_kept = self._is_to_be_kept()
        if not self._steps_kept:
            return self._average()
        self._stop_if_changed()
        self._look()
        self._kept.put_aside(optimizer)

    def _give_up_if_impossible(self, held: Held, has_closure: bool) -> None:
        """Stop where an optimizer is about to step; JobStops where its gradients should have been clipped."""
        if has_closure:
            why = "the optimizer runs backward itself (a closure)"
        elif not held.all:
            why = "no one optimizer steps all that DDP reduces"
        elif held.others:
            why = STEPS_OTHERS
        else:
            return
        if self._steps > 1 and self.makes_several_one():
            if self._left_out:
                raise left_unreduced(why, ACCUMULATE_STEPS.name)
            self.stop()
            self._gives_up(why)

    @torch.no_grad()
    def _average(self) -> None:
        """Divide the sum over the steps by their number, once, when it is reduced on all ranks."""
        self._thrown_away = 0
        # DDP has reduced it by now, but for objects that were not used in this step, or whose step was to be kept.
        self._implicit_no_sync.reduce(self._local.values())
        self._kept.average()

    def _stop_if_changed(self) -> None:
        """Stop the job if the script has changed gradients since a function of torch was kept from doing so.

        They are neither unscaled nor reduced: a script that clips by itself would clip something else.
        """
        self._own_reads.end()
        read, self._read = self._read, []
        if any(p.grad is not None and int(sum_of_bits(p.grad)) != int(bits) for p, bits in read):
            raise left_unreduced(CHANGES_GRADIENTS, ACCUMULATE_STEPS.name)

    def _look(self) -> None:
        """Stop the job if the script holds gradients that are kept: they are not reduced, and more is added to them.

        One rank alone may hold some, so the ranks cannot all make single steps again.
        """
        self._before = ""
        if not self._looks:
            return
        self._before = checksum(self._parameters())
        self._looks -= 1
        if are_held([p.grad for p in self._parameters() if p.grad is not None]):
            raise left_unreduced(KEEPS_GRADIENTS, ACCUMULATE_STEPS.name)

    def after_step(self, optimizer: Optimizer) -> None:
        """Keep the gradients that were put aside, or start over after the last step."""
        if not are_reduced(held_by(optimizer), self._wrapped()):
            return
        self._inside = max(0, self._inside - 1)
        if self._is_single or self._inside:
            return
        self._ended += 1
        self._begin_step()
        if self._steps_kept:
            if self._before and checksum(self._parameters()) != self._before:
                raise left_unreduced(STEPS_WITHOUT_GRADIENTS, ACCUMULATE_STEPS.name)
            return self._kept.keep(optimizer)
        self._has_updated = True
        self._norms.step_ended(is_made=True)
        if self._steps > 1:  # else a backward pass whose reduction was put off may be yet to come
            self._local = {}
        self._start_over()

    def step_skipped(self, optimizer: Optimizer) -> None:
        """See `GradientHandler`."""
        if are_reduced(held_by(optimizer), self._wrapped()):
            self._norms.step_ended(is_made=False)
            self._start_over()
            self._begin_step()

    def keeps_scale(self) -> bool:
        """See `GradientHandler`: what is kept is scaled by the present scale.

        A scaler that was not asked to unscale has nothing to update by. In the last step it was asked, also if the
        script leaves that step out by itself, which nothing else tells of by then.
        """
        return self._scaler_waits or (self._steps_kept and not self.in_step)

    def keeps(self, parameters: Sequence[torch.Tensor]) -> bool:
        """See `GradientHandler`. Gradients to which a backward pass has added are thrown away with what was kept."""
        if not are_reduced(parameters, self._wrapped()):
            return False
        self.clears = True
        if self._kept.steps and not self._kept.have_changed:
            return True
        self._thrown_away += bool(self._kept.steps)
        if self.in_step and self._local and any(p.grad is not None for p in self._parameters()):
            # The script has read them after it was told a norm, so it may have used them, and for something else than a
            # step: they are neither clipped nor reduced.
            used = self._left_out and self._has_updated and self._own_reads.has_read()
            self._own_reads.end()
            if used:
                raise left_unreduced(DISCARDS_GRADIENTS, ACCUMULATE_STEPS.name)
            self._ended += 1
            # As written, the script decides by gradients that are the same on all ranks. Those that it reads itself in
            # a step that is kept are this rank's own, so others may not throw the step away.
            all_throw_away(self._ended, self._local)
            self._norms.thrown_away()
        self._left_out = False  # of gradients that are gone
        self._norms.step_ended(is_made=False)
        self._start_over()
        return False
