"""Makes one optimizer step of several steps of the script: all but the last keep their gradients for the last one.

The script still calls whatever it calls. Until the last of the steps its optimizer finds no gradients and so does
nothing, `zero_grad` leaves the kept gradients alone, clipping only tells their norm and the gradient scaler waits. In
the last step DDP reduces the sum of all gradients, which is divided by their number before anything reads it.

Learning-rate schedulers go on with every step of the script: the rate stays a function of the samples seen.

Some scripts do what cannot be done with several steps in one. If that is seen before it does harm, the script's present
step ends the optimizer step, with the mean of what was kept, and each later one is an optimizer step of its own. If it
is seen too late, the job stops.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import Optimizer

from autoddp.knobs import Configuration
from autoddp.knobs.ddp_arguments import KEEPS_GRADIENTS
from autoddp.knobs.micro_batches import (
    ACCUMULATE_STEPS,
    DISCARDS_GRADIENTS,
    STEPS_OTHERS,
    STEPS_WITHOUT_GRADIENTS,
)
from autoddp.worker.ddp.handlers import DdpEvents
from autoddp.worker.ddp.private import is_joining, must_reduce, store_of, version_of
from autoddp.worker.ddp.wrapped import Wrapped
from autoddp.worker.effects.base import Effect
from autoddp.worker.gradients.access import GradientHandler, are_reduced, held_by, ids_of, parameters_of
from autoddp.worker.gradients.deferred import ImplicitNoSync
from autoddp.worker.gradients.equal_parameters import checksum
from autoddp.worker.gradients.switch import ReductionSwitch, StillThere, left_unreduced
from autoddp.worker.gradients.views import are_held
from autoddp.worker.job.fitting import waited

_LOOKS = 20  # steps that are kept, in which it may be seen that the script holds gradients, or steps without them
_PATIENCE = 60.0  # seconds in which the other ranks come to the same place of the script


def _has_reached(store: Any, key: str, count: int) -> bool:
    return bool(store.add(key, 0) >= count)


class _Norms:
    """Norms of gradients that are the same on all ranks, by what has read them."""

    def __init__(self) -> None:
        self._known: dict[str, torch.Tensor] = {}

    def of_all(self, which: str, norm: torch.Tensor) -> torch.Tensor:
        """Remember this one, of gradients that are reduced, if it is finite; and return it."""
        before = self._known.get(which, norm)
        # The host need not wait for the device.
        self._known[which] = torch.where(norm.isfinite(), norm, before).detach()
        return norm

    def last(self, which: str, norm: torch.Tensor, ddp: DDP) -> torch.Tensor:
        """The one that was remembered; where there is none yet, rank 0's own `norm`, which it gives to all ranks."""
        if which not in self._known:
            store, size = store_of(ddp), ddp.process_group.size()
            if store is not None and size > 1:
                key = f"autoddp/norm/{which}"
                if dist.get_rank(ddp.process_group) == 0:
                    store.set(key, repr(float(norm)))
                if waited(lambda: store.check([key]), _PATIENCE):
                    norm = torch.full_like(norm, float(store.get(key)))
            self._known[which] = norm.detach()
        return self._known[which].clone()


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
        self._steps = 1
        self._thrown_away = 0
        """How often the script has thrown away what was kept, since the last of several steps."""
        self._looks = _LOOKS
        self._ended = 0  # steps that were made or thrown away: at the same place of the script as many on all ranks
        self._before = ""
        """Checksum of the parameters, where the optimizer must not change them; "" where nothing is compared."""
        self._norms = _Norms()
        self._unchanged = StillThere(ACCUMULATE_STEPS.name)
        self._aside: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._groups: list[dict[str, Any]] = []
        self._inside = 0  # optimizers that are stepping: one may step by another one that holds the same parameters
        # Objects whose gradients are this rank's own: their reduction was put off. They are kept alive, because each
        # rank's garbage collector frees what the script drops at another time, and all ranks must reduce the same.
        self._local: dict[DDP, Wrapped] = {}
        self._has_updated = False
        self._start_over()
        self._begin_step()
        self.clears = False
        """Whether the script has called `zero_grad` of what DDP reduces: kept gradients can be protected from it."""
        self._stepped: set[bool] = set()  # by optimizers that hold some of what DDP reduces: do they hold all?
        self._has_stepped_others = self._trains = False
        self._given: list[Optimizer] = []
        self._others: list[torch.Tensor] = []  # held by an optimizer beside what DDP reduces

    def _start_over(self) -> None:
        self._kept = 0  # steps of the script whose gradients are part of the present ones
        # Gradients as last kept, with their version. References are weak: `BucketViews` looks for who holds gradients.
        self._seen: dict[nn.Parameter, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._holding = self._averaged = False
        # Whether no pass has reduced since: such a pass may put gradients into other tensors, those of DDP's buckets.
        self._in_place = True
        self._unchanged.end()

    def _begin_step(self) -> None:
        self.in_step = False  # whether a model was called for training since the script's last step
        self._left_out = False  # whether clipping or unscaling was, which nothing can make up for

    def apply(self, configuration: Configuration) -> None:
        """See `Effect`."""
        self.steps = configuration.steps_per_update

    @property
    def steps(self) -> int:
        """Number of the script's steps that make one optimizer step: 1 as written."""
        return self._steps

    @steps.setter
    def steps(self, count: int) -> None:
        """Set the number, at a step boundary. What was kept is left to the script, unreduced."""
        self._put_back()
        self._start_over()
        self._begin_step()
        self._local, self._inside = {}, 0
        self._steps, self._thrown_away = count, 0

    @property
    def _holds(self) -> bool:
        """Whether the present optimizer step needs further steps of the script after the present one."""
        return self._kept < self._steps - 1

    @property
    def _idle(self) -> bool:
        """Whether each step of the script is an optimizer step, and nothing is kept of steps before."""
        return self._steps == 1 and not self._kept and not self._local

    def keeps_on(self) -> bool:
        """Whether several steps are still to be one, asked after a backward pass and before its gradients are kept."""
        if self._holds and self._why_not():
            self.stop()
        return self._steps > 1

    def _keeps(self) -> bool:
        return self.keeps_on() and self._holds

    def stop(self) -> None:
        """Make the script's present step end the optimizer step, and each later one an optimizer step of its own.

        All ranks call it at the same place. What was put off is reduced before it is read.
        """
        self._put_back()
        self._steps, self._holding, self._inside = 1, False, 0
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
            for p in self._seen:
                p.grad = None
            self.steps = 1
        return True

    def built(self, wrapped: Wrapped) -> None:
        """The script has built a DDP model. After its first steps, each of its steps is one again."""
        if self._stepped and self.leave_out():
            self._gives_up("the script builds another model")

    @property
    def one_optimizer(self) -> bool:
        """Whether all that DDP reduces has been stepped by one optimizer, so far."""
        return self._stepped == {True}

    @property
    def steps_others(self) -> bool:
        """Whether an optimizer steps what no DDP object reduces: beside what one reduces, or since one is trained."""
        return self._has_stepped_others or any(p.requires_grad for p in self._others)

    def forward_begins(self, ddp: DDP) -> None:
        """A forward pass is about to run; what is decided here holds for its backward pass."""
        self._inside = 0
        self._find_others()
        # A script that clears gradients between two backward passes of each step would never make a last step. It may
        # have read those of its own rank, so not before the step is over, in which its optimizer has done nothing.
        if self._thrown_away > 1 and not self.in_step and self.leave_out():
            self._gives_up(DISCARDS_GRADIENTS)
        if self._in_place and any(p.grad is None or p.grad is not kept() for p, (kept, _) in self._seen.items()):
            self._start_over()
            self._end("the script clears gradients without zero_grad")
        if is_joining(ddp):
            self._end("the script uses join()")
        if any(p.requires_grad for p in self._others):
            self._end(STEPS_OTHERS)
        if torch.is_grad_enabled():
            self._average_again_later()
        if not (torch.is_grad_enabled() and self._switch.as_written(ddp)):
            return
        self._trains = self.in_step = True
        if not self._switch.reduces(ddp):
            return
        self._local.pop(ddp, None)
        # To reduce what is equal on all ranks again changes nothing: the mean of equal parts is that part.
        if must_reduce(ddp) or not self._holds:
            self._in_place = False
        if not self._holds:
            return
        # Once a torch optimizer has stepped, what the script changes itself is made of something else.
        if not self._kept:
            self._unchanged.check()
        self._unchanged.begin(self._parameters)
        if not must_reduce(ddp):
            self._switch.put_off = True
            self._local[ddp] = next(wrapped for wrapped in self._wrapped() if wrapped.ddp is ddp)

    def _end(self, why: str) -> None:
        """Stop, in a forward pass."""
        if self._steps > 1:
            self.stop()
            self._gives_up(why)

    def given(self, optimizer: Optimizer) -> None:
        """See `GradientHandler`. The script may make its optimizer before its DDP object: what it holds is asked later.

        Optimizers are not looked for later on, because each rank's garbage collector frees them at another time.
        """
        self._given.append(optimizer)

    def _find_others(self) -> None:
        if not self._given:
            return
        given, self._given = self._given, []
        reduced = ids_of(self._parameters)
        for held in map(held_by, given):
            if not reduced.isdisjoint(ids_of(held)):
                self._others += [p for p in held if id(p) not in reduced]

    def before_reading(self, parameters: Sequence[torch.Tensor]) -> bool:
        """See `GradientHandler`."""
        if self._idle or not are_reduced(parameters, self._wrapped()):
            return False
        if self._keeps():
            self._left_out = True
            return True
        self._average()
        return False

    def norm_read(self, function: str, parameters: Sequence[torch.Tensor], norm: torch.Tensor) -> torch.Tensor:
        """See `GradientHandler`. In a step that is kept, the norm of the last step in which it was that of all ranks.

        The norm of a kept step is this rank's own. A script that leaves out a step by its norm, or clips by the norms
        so far, would decide otherwise on each rank.
        """
        wrapped = self._wrapped()
        if self._steps == 1 or not are_reduced(parameters, wrapped):
            return norm
        given, reduced = ids_of(parameters), self._parameters
        places = (n for n, p in enumerate(reduced) if id(p) in given or id(p.grad) in given)
        which = f"{function} {next(places, 0)} {len(parameters)}"
        if not (self._left_out and self._holds):
            return self._norms.of_all(which, norm)
        return self._norms.last(which, norm, next(w.ddp for w in wrapped if w.ddp is not None))

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Average the gradients in the last step; put them aside in the others."""
        held = held_by(optimizer)
        reduced = self._parameters
        ids, ids_of_reduced = ids_of(held), ids_of(reduced)
        of_it = [id(p) in ids for p in reduced if p.requires_grad or id(p) in ids]
        others = any(p.grad is not None for p in held if id(p) not in ids_of_reduced)
        self._has_stepped_others |= others and self._trains
        if not any(of_it):
            if others and self._steps > 1 and self._trains and not self._has_updated and self.keeps_on():
                # It may have made its gradients from those that are not reduced, as optimizers with copies in
                # another precision do. Later on, one rank alone may train another model for an evaluation.
                raise left_unreduced(STEPS_OTHERS, ACCUMULATE_STEPS.name)
            return
        self._stepped.add(all(of_it))
        if self._idle:
            return
        if has_closure:
            self._give_up("the optimizer runs backward itself (a closure)")
        elif not all(of_it):
            self._give_up("no one optimizer steps all that DDP reduces")
        elif others:
            self._give_up(STEPS_OTHERS)
        self._inside += 1
        if self._inside > 1:
            return
        self._holding = self._keeps()
        if not self._holding:
            return self._average()
        self._look()
        self._aside = [(p, p.grad) for p in self._parameters if p.grad is not None]
        for p, _ in self._aside:
            p.grad = None
        self._groups = [dict(group) for group in optimizer.param_groups]

    def after_step(self, optimizer: Optimizer) -> None:
        """Put the gradients back that were aside."""
        if not are_reduced(held_by(optimizer), self._wrapped()):
            return
        self._inside = max(0, self._inside - 1)
        if self._idle or self._inside:
            return
        self._ended += 1
        self._begin_step()
        if not self._holding:
            self._has_updated = True
            if self._steps > 1:  # else a backward pass whose reduction was put off may be yet to come
                self._local = {}
            return self._start_over()
        if self._before and checksum(self._parameters) != self._before:
            raise left_unreduced(STEPS_WITHOUT_GRADIENTS, ACCUMULATE_STEPS.name)
        self._put_back()
        for group, before in zip(optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update(before)  # some optimizers count their steps there, whether or not there are gradients
        self._kept, self._in_place = self._kept + 1, True
        self._seen = {p: (weakref.ref(p.grad), version_of(p.grad)) for p in self._parameters if p.grad is not None}

    def step_skipped(self, optimizer: Optimizer) -> None:
        """See `GradientHandler`."""
        if are_reduced(held_by(optimizer), self._wrapped()):
            self._start_over()
            self._begin_step()

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
        if self.in_step and self._local and any(p.grad is not None for p in self._parameters):
            self._agree()
        self._start_over()
        return False

    def _agree(self) -> None:
        """Wait until all ranks throw this step away; RuntimeError if some do not.

        As written, the script decides by gradients that are the same on all ranks. Those that it reads itself in a step
        that is kept are this rank's own. Ranks that decide differently would reduce in different steps from then on.
        """
        self._ended += 1
        for ddp in {id(ddp.process_group): ddp for ddp in self._local}.values():
            store, size = store_of(ddp), ddp.process_group.size()
            if store is None:
                continue
            key = f"autoddp/thrown/{self._ended}"
            store.add(key, 1)
            if not waited(functools.partial(_has_reached, store, key, size), _PATIENCE):
                raise left_unreduced("some ranks alone leave out a step", ACCUMULATE_STEPS.name)

    def keeps_scale(self) -> bool:
        """What is kept is scaled by the present scale."""
        return self._holding

    def _look(self) -> None:
        """Stop the job if the script holds gradients that are kept: they are not reduced, and more is added to them.

        One rank alone may hold some, so the ranks cannot all make single steps again.
        """
        self._before = ""
        if not self._looks:
            return
        self._before = checksum(self._parameters)
        self._looks -= 1
        if are_held([p.grad for p in self._parameters if p.grad is not None]):
            raise left_unreduced(KEEPS_GRADIENTS, ACCUMULATE_STEPS.name)

    def _put_back(self) -> None:
        for p, gradient in self._aside:
            p.grad = gradient
        self._aside = []

    def _give_up(self, why: str) -> None:
        """Stop where an optimizer is about to step; RuntimeError where its gradients should have been clipped."""
        if self._steps > 1 and self.keeps_on():
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
        if self._averaged or not self._kept:
            return
        self._averaged = True
        for p in self._parameters:
            if p.grad is not None:
                p.grad.div_(self._kept + 1)

    @torch.no_grad()
    def _average_again_later(self) -> None:
        """Make gradients a sum again: the script has read them, and now another pass of the same step adds to them."""
        if self._averaged:
            self._averaged = False
            for p in self._parameters:
                if p.grad is not None:
                    p.grad.mul_(self._kept + 1)

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return parameters_of(self._wrapped())
