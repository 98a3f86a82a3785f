"""The step clock: calls back at the end of each step of the script, a moment at which no gradient is on its way.

A step is one `step()` of the clock optimizer: of those that hold DDP parameters the last in the script's cycle. In a
GAN the generator's graph may still be waiting while the discriminator steps, but nothing waits after the last of them.
A script that updates its parameters without a torch optimizer is counted by its reducing forward passes.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import Optimizer

from autoddp.worker.ddp.handlers import DdpEvents
from autoddp.worker.ddp.wrapped import Wrapped
from autoddp.worker.gradients.access import GradientHandler, add_handler, held_by, ids_of, parameters_of, remove_handler

_CYCLES = 3  # steps of the first optimizer seen before the clock is chosen
_MOST_STEPS = 12  # of the first optimizer, after which parameters that no optimizer steps are no longer waited for
_FORWARDS = 12  # reducing forward passes without any optimizer step: the script may have no optimizer
_OTHERS = 12  # steps of other optimizers in a row after a model was built: then the script trains that one
_MANY_OTHERS = 200  # the same where none was built: in some GANs a critic makes a hundred steps before its generator
_MOST_FORWARDS = 1000  # the same with an optimizer: the script may accumulate over many, or a closure run many


class StepClock(DdpEvents, GradientHandler):
    """`on_step()` is called at each step boundary once the clock is chosen.

    `wrapped()` gives the script's DDP objects, and `reduces` says of one whether its present forward pass reduces.
    `forwards` counts reducing forward passes since the last boundary.
    """

    def __init__(
        self, wrapped: Callable[[], Sequence[Wrapped]], on_step: Callable[[], None], reduces: Callable[[DDP], bool]
    ) -> None:
        self._wrapped = wrapped
        self._reduces = reduces
        self._on_step = on_step
        self._seen: list[frozenset[int]] = []
        self._counts: dict[frozenset[int], int] = {}
        self._clock: frozenset[int] | None = None
        self._built_since = False
        self._chosen_before = False
        self._others = 0
        self._watched: list[weakref.ref[torch.Tensor]] = []
        self.steps_without_ddp = 0
        """Optimizer steps that touched no DDP parameter, so far."""
        self.steps = 0
        """Steps of the script so far, those before the clock was chosen included."""
        self.forwards = 0
        self._by_forwards = False
        self._patience = _FORWARDS
        self._stopped = False
        # Of each optimizer that is stepping, what others have stepped inside it.
        self._stepping: dict[int, set[frozenset[int]]] = {}
        add_handler(self)

    def stop(self) -> None:
        """Call back no more."""
        self._stopped = True
        remove_handler(self)

    def built(self, wrapped: Wrapped) -> None:
        """See `DdpEvents`. The script may train that model from here on instead of the earlier ones."""
        self._built_since, self._others = self._clock is not None, 0

    def forward_begins(self, ddp: DDP) -> None:
        """See `DdpEvents`."""
        if self._stopped or not (self._reduces(ddp) and torch.is_grad_enabled()):
            return
        if self._by_forwards:
            self._end_step()
            self.forwards = 0
        elif self._clock is None and not self._seen and self.forwards >= self._patience:
            self._lose_patience()
        self.forwards += 1

    def _lose_patience(self) -> None:
        """Count forward passes instead of steps, or wait longer if there is an optimizer that has not stepped yet."""
        ours = self._ids()
        optimizers = (thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer))
        if self._patience == _FORWARDS and any(ids_of(held_by(optimizer)) & ours for optimizer in optimizers):
            self._patience = _MOST_FORWARDS
        else:
            self._by_forwards, self.steps = True, self.forwards

    def _end_step(self) -> None:
        self.steps += 1
        self._on_step()

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """See `GradientHandler`."""
        self._stepping[id(optimizer)] = set()

    def after_step(self, optimizer: Optimizer) -> None:
        """See `GradientHandler`. An optimizer around another one of the same parameters (SAM, Lookahead) is no second.

        The inner one counts: if its step raises, nothing has to be undone here. Where a class calls `super().step()`,
        torch may tell of both methods, for one optimizer: then the outer one finds nothing here, and is no second.
        """
        inside = self._stepping.pop(id(optimizer), None)
        if self._by_forwards or inside is None:
            return
        ours = self._ids()
        held = ids_of(held_by(optimizer)) & ours
        for others in self._stepping.values():
            others.add(held)
        if not held:
            self.steps_without_ddp += 1
        elif held in inside:
            return
        elif self._is_clock(held, ours, optimizer):
            self._others = 0
            self._end_step()
            self.forwards = 0
        elif self._clock is not None:
            self._others += 1
            if self._others >= (_OTHERS if self._built_since else _MANY_OTHERS):
                self._choose_again()

    def step_skipped(self, optimizer: Optimizer) -> None:
        """A step that a GradScaler leaves out counts.

        Where nothing is reduced, as while the headroom is measured, one rank alone may find an infinite gradient. If it
        counted fewer steps than the others from there on, all would wait for each other.
        """
        self._stepping[id(optimizer)] = set()
        self.after_step(optimizer)

    def _ids(self) -> frozenset[int]:
        return ids_of(parameters_of(self._wrapped()))

    def _choose_again(self) -> None:
        """Forget which optimizer marks a step, and choose anew by counting steps.

        Not by which models still exist: each rank's garbage collector frees a dropped model at another time, and all
        ranks must count the same steps.
        """
        self._clock, self._seen, self._counts = None, [], {}
        self._built_since, self._chosen_before, self._others = False, True, 0

    def _watch(self, optimizer: Optimizer) -> None:
        """Match the clock's optimizer no longer once one of its parameters is freed.

        Python may then give the same id to a parameter of another model, on one rank and not on the others.
        """

        def gone(_: weakref.ref[torch.Tensor]) -> None:
            if self._clock is not None:
                self._clock = frozenset()  # equals no optimizer's: those that are compared hold parameters

        self._watched = [weakref.ref(p, gone) for p in held_by(optimizer)]

    def _is_clock(self, held: frozenset[int], ours: frozenset[int], optimizer: Optimizer) -> bool:
        """Whether the optimizer is the clock: by what it holds, as some scripts make a new one every epoch.

        A discriminator may step several times before its generator does: as long as parameters under DDP have not been
        stepped at all, the last optimizer of the cycle may be yet to come.

        Where the script goes on with more parameters, it is given them, or another optimizer takes its place.
        """
        if self._clock is None:
            if held not in self._seen:
                self._seen.append(held)
            self._counts[held] = self._counts.get(held, 0) + 1
            all_stepped = ours <= frozenset().union(*self._seen) and not self._chosen_before
            patience = _CYCLES if all_stepped else _MOST_STEPS
            if held == self._seen[-1] and self._counts[self._seen[0]] >= patience:
                self._clock = self._seen[-1]
                self.steps += self._counts[held] - 1  # this one is counted by the caller
                self._watch(optimizer)
        elif self._clock and held > self._clock and held not in self._seen:
            self._clock = held
            self._watch(optimizer)
        return held == self._clock
