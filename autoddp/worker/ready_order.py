"""May DDP be told that the graph is static? Only if every gradient became ready once per step, always in one order."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn


class ReadyOrder:
    """Watches gradients become ready over a few steps, then takes its hooks off again.

    order = ReadyOrder(parameters)
    …                       # some steps, order.step() at the end of each
    order.stop(); order.is_static
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        watched = list(parameters)
        self._count = len(watched)
        self._now: list[int] = []
        self._steps: list[tuple[int, ...]] = []
        # What is frozen now is watched by its absence: it may be thawed later.
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
        """Whether all full steps seen were alike and left out no parameter; needs three. The first may be a part."""
        full = self._steps[1:]
        return len(full) >= 3 and len(set(full)) == 1 and sorted(full[0]) == list(range(self._count))
