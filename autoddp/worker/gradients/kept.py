"""The gradients of steps that are kept for a later optimizer step: put aside, put back, known again, averaged.

    kept = KeptGradients(parameters)
    kept.put_aside(optimizer)    # the optimizer steps, and finds no gradients
    kept.keep(optimizer)         # they are there again, and one more step is part of them
    kept.average()               # in the last step, before anything reads them

Nothing here holds a gradient over a backward pass: `BucketViews` would take that for the script.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from autoddp.worker.ddp.private import version_of


class KeptGradients:
    """`parameters()` gives what DDP reduces."""

    def __init__(self, parameters: Callable[[], Sequence[nn.Parameter]]) -> None:
        self._parameters = parameters
        self._aside: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._groups: list[dict[str, Any]] = []
        """The settings of the optimizer that steps while its gradients are aside."""
        self.start_over()

    def start_over(self) -> None:
        """Forget what was kept. The present gradients stay where they are."""
        self.steps = 0
        """Steps of the script whose gradients are part of the present ones."""
        self._seen: dict[nn.Parameter, tuple[weakref.ref[torch.Tensor], int]] = {}
        """The gradients as they were last kept, with their versions."""
        self._are_averaged = False
        self._stay_in_place = True

    def put_aside(self, optimizer: Optimizer) -> None:
        """Take the gradients from this optimizer, which is about to step."""
        self._aside = [(p, p.grad) for p in self._parameters() if p.grad is not None]
        for p, _ in self._aside:
            p.grad = None
        self._groups = [dict(group) for group in optimizer.param_groups]

    def put_back(self) -> None:
        """Give the parameters what was put aside."""
        for p, gradient in self._aside:
            p.grad = gradient
        self._aside = []

    def keep(self, optimizer: Optimizer) -> None:
        """Put back what was aside while this optimizer has stepped: one more step is kept."""
        self.put_back()
        for group, before in zip(optimizer.param_groups, self._groups, strict=True):
            # Some optimizers count their steps there, whether or not there are gradients. The rate is that of a
            # scheduler, which the script may step in a hook of the optimizer.
            rate = {name: group[name] for name in ("lr",) if name in group}
            group.clear()
            group.update(before | rate)
        self.steps, self._stay_in_place = self.steps + 1, True
        self._seen = {p: (weakref.ref(p.grad), version_of(p.grad)) for p in self._parameters() if p.grad is not None}

    def throw_away(self) -> None:
        """Clear the gradients that were kept."""
        for p in self._seen:
            p.grad = None

    def may_move(self) -> None:
        """A pass that reduces may put gradients into other tensors, those of DDP's buckets."""
        self._stay_in_place = False

    @property
    def were_cleared(self) -> bool:
        """Whether the script has cleared some since they were kept."""
        return self._stay_in_place and any(
            p.grad is None or p.grad is not kept() for p, (kept, _) in self._seen.items()
        )

    @property
    def have_changed(self) -> bool:
        """Whether a backward pass has added to some since they were kept, or the script has cleared some."""
        return any(
            p.grad is None or p.grad is not kept() or version_of(p.grad) != version
            for p, (kept, version) in self._seen.items()
        )

    @torch.no_grad()
    def average(self) -> None:
        """Divide the sum over the kept steps and the present one by their number, once."""
        if self._are_averaged or not self.steps:
            return
        self._are_averaged = True
        for p in self._parameters():
            if p.grad is not None:
                p.grad.div_(self.steps + 1)

    @torch.no_grad()
    def sum_again(self) -> None:
        """Make them a sum again: the script has read them, and now another pass of the same step adds to them."""
        if self._are_averaged:
            self._are_averaged = False
            for p in self._parameters():
                if p.grad is not None:
                    p.grad.mul_(self.steps + 1)
