"""What the script's optimizers hold: of the parameters that DDP reduces, and beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from autoddp.worker.gradients.access import held_by, ids_of


@dataclass(frozen=True)
class Held:
    """What one optimizer holds that is about to step."""

    some: bool
    """Whether it holds some of what DDP reduces."""
    all: bool
    """Whether it holds all of that, but for what the script has frozen."""
    others: bool
    """Whether it holds other parameters that have gradients."""


class Optimizers:
    """`parameters()` gives what DDP reduces."""

    def __init__(self, parameters: Callable[[], Sequence[nn.Parameter]]) -> None:
        self._parameters = parameters
        self._given: list[Optimizer] = []
        """Optimizers that were given parameters since the last look."""
        self._beside: list[torch.Tensor] = []
        """What an optimizer holds beside what DDP reduces."""
        self._stepped: set[bool] = set()
        """For those that have stepped and hold some of what DDP reduces: do they hold all of it?"""
        self._has_stepped_others = False

    def given(self, optimizer: Optimizer) -> None:
        """This optimizer was given parameters. The script may build its DDP object later, so they are looked at later.

        Optimizers are not looked for later on, because each rank's garbage collector frees them at another time.
        """
        self._given.append(optimizer)

    def look(self) -> None:
        """Look at what they were given. Call it when a forward pass begins: what DDP reduces is known by then."""
        if not self._given:
            return
        given, self._given = self._given, []
        reduced = ids_of(self._parameters())
        for held in map(held_by, given):
            if not reduced.isdisjoint(ids_of(held)):
                self._beside += [p for p in held if id(p) not in reduced]

    def about_to_step(self, optimizer: Optimizer, trains: bool) -> Held:
        """What this one holds. `trains`: the script has trained a model of DDP's by now."""
        held, reduced = held_by(optimizer), self._parameters()
        ids, ids_of_reduced = ids_of(held), ids_of(reduced)
        of_it = [id(p) in ids for p in reduced if p.requires_grad or id(p) in ids]
        found = Held(any(of_it), all(of_it), any(p.grad is not None for p in held if id(p) not in ids_of_reduced))
        self._has_stepped_others |= found.others and trains
        if found.some:
            self._stepped.add(found.all)
        return found

    @property
    def have_stepped(self) -> bool:
        """Whether one of them has stepped something that DDP reduces."""
        return bool(self._stepped)

    @property
    def are_one(self) -> bool:
        """Whether all that DDP reduces has been stepped by one optimizer, so far."""
        return self._stepped == {True}

    @property
    def hold_others(self) -> bool:
        """Whether one that holds something that DDP reduces also holds what DDP does not."""
        return any(p.requires_grad for p in self._beside)

    @property
    def step_others(self) -> bool:
        """Whether one steps what no DDP object reduces: beside what one reduces, or since one is trained."""
        return self._has_stepped_others or self.hold_others
