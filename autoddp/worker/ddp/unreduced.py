"""Finds out whether each rank trains a model of its own, because DDP reduces in no step.

A script may call `ddp.module` directly, or never leave `no_sync`. Local SGD does that rightly, and so does a script
that averages gradients or parameters itself. So where no reduction was seen, the parameters of the ranks are compared,
by checksums from several steps in a row: ranks that average every few steps are equal in one of them. The checksums go
into the store of the ranks. No collective is added, and no rank waits for another one: the last to come compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import Optimizer

from autoddp import codec
from autoddp.knobs.job import OWN_MODELS, are_apart
from autoddp.worker.ddp.backward import when_backward_begins
from autoddp.worker.ddp.handlers import DdpEvents
from autoddp.worker.ddp.private import store_of
from autoddp.worker.ddp.wrapped import Wrapped
from autoddp.worker.gradients.access import GradientHandler, add_handler, held_by, ids_of, parameters_of, remove_handler
from autoddp.worker.gradients.equal_parameters import checksum
from autoddp.worker.gradients.switch import ReductionSwitch

STEPS = 20  # of the script: if none of them has reduced by then, the ranks are compared
_LOOKS = 8  # checksums, before the last of these steps


class Unreduced(DdpEvents, GradientHandler):
    """Tell it of forward passes. `done(checksums)` is called before step `STEPS`, if nothing was reduced by then."""

    def __init__(
        self,
        wrapped: Callable[[], Sequence[Wrapped]],
        switch: ReductionSwitch,
        done: Callable[[list[str]], None] = lambda checksums: None,
    ) -> None:
        self._wrapped, self._switch, self._done = wrapped, switch, done
        self._clock: frozenset[int] | None = None
        self._is_watching = True
        self._steps = 0
        self.checksums: list[str] = []
        """Checksums (`equal_parameters.checksum`) of what ranks should have alike; empty where a reduction was seen."""
        add_handler(self)

    def returned(self, ddp: DDP, what: Any) -> Any:
        """See `DdpEvents`. A backward pass from what the module has returned reduces, if the script says so."""
        reduces = torch.is_grad_enabled() and self._switch.as_written(ddp)
        if self._is_watching and reduces and not when_backward_begins(what, self._reduces):
            self._reduces()  # the gradients may come from an object in which DDP finds no tensors
        return what

    def _reduces(self) -> None:
        self.checksums = []
        self._stop()

    def _stop(self) -> None:
        self._is_watching = False
        remove_handler(self)

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """See `GradientHandler`. Not after a step: the script may average its ranks' parameters there."""
        held = ids_of(held_by(optimizer))
        alike = [w for w in self._wrapped() if w.ddp is not None and w.script_hook is None]
        parameters = [p for p in parameters_of(alike) if id(p) in held]
        if not parameters:
            return
        self._clock = self._clock or held  # of several optimizers the first; a script may make a new one every epoch
        if held != self._clock:
            return
        self._steps += 1
        if self._steps > STEPS - _LOOKS:
            self.checksums.append(checksum(parameters))
        if self._steps == STEPS:
            self._stop()
            self._done(self.checksums)


def compare(wrapped: Sequence[Wrapped], checksums: Sequence[str], tell: Callable[[str], None]) -> None:
    """Put this rank's checksums into the store; the last rank to do so tells if the ranks are apart."""
    ddp = next((w.ddp for w in reversed(wrapped) if w.ddp is not None), None)
    store = None if ddp is None else store_of(ddp)
    if ddp is None or store is None:
        return
    group = ddp.process_group
    store.set(_key(dist.get_rank(group)), codec.encode(list(checksums)))
    if store.add("autoddp/unreduced/said", 1) != group.size():
        return
    of_all = [codec.decode(store.get(_key(rank)).decode(), list[str]) for rank in range(group.size())]
    if are_apart(of_all):
        tell(OWN_MODELS)


def _key(rank: int) -> str:
    return f"autoddp/unreduced/{rank}"
