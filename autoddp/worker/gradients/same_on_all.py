"""What must be the same on all ranks while steps are kept, whose gradients are each rank's own.

A script that decides by a norm, or throws a step away, would otherwise do something else on each rank, and from then on
the ranks would reduce in different steps. They agree through the store of the model's process group.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs.micro_batches import ACCUMULATE_STEPS
from autoddp.worker.ddp.private import store_of
from autoddp.worker.gradients.switch import left_unreduced
from autoddp.worker.job.fitting import waited

_PATIENCE = 60.0  # seconds, at least, in which the other ranks come to the same place of the script


class Norms:
    """Norms of gradients that are the same on all ranks, by what has read them."""

    def __init__(self) -> None:
        self._known: dict[str, torch.Tensor] = {}
        self._present: dict[str, torch.Tensor] = {}
        """Norms of the present step, by what has read them, until the optimizer has made it."""
        self._own: set[str] = set()
        """Names of known norms that are rank 0's own, because no step was made yet."""

    def of_all(self, which: str, norm: torch.Tensor) -> torch.Tensor:
        """Remember this one, of gradients that are reduced, if it is finite and its step is made; and return it."""
        before = self._known.get(which, norm)
        # The host need not wait for the device.
        self._present[which] = torch.where(norm.isfinite(), norm, before).detach()
        return norm

    def step_ended(self, is_made: bool) -> None:
        """The script has made its step, or left it out: told that norm again, it would leave out each later step."""
        if is_made:
            self._known |= self._present
            self._own -= self._present.keys()
        self._present = {}

    def thrown_away(self) -> None:
        """The script has thrown away a step that was kept; all ranks call this there.

        Told rank 0's own norm again, which may be infinite, or that of gradients that are still scaled, it would throw
        away each later one. Told 0, it goes on to a step that reduces, and decides by the norm of that one.
        """
        self._known |= {which: torch.zeros_like(self._known[which]) for which in self._own}

    def last(self, which: str, norm: torch.Tensor, ddp: DDP) -> torch.Tensor:
        """The one that was remembered; where there is none yet, rank 0's own `norm`, which it gives to all ranks."""
        if which not in self._known:
            store, size = store_of(ddp), ddp.process_group.size()
            if store is not None and size > 1:
                key = f"autoddp/norm/{which}"
                if ddp.process_group.rank() == 0:
                    store.set(key, repr(float(norm)))
                # Not longer: if this rank alone reads the norm, to log it, the others wait for it in a collective.
                if waited(lambda: store.check([key]), _patience(store) / 2):
                    norm = torch.full_like(norm, float(store.get(key)))
            self._known[which] = norm.detach()
            self._own.add(which)
        return self._known[which].clone()


def all_throw_away(number: int, objects: Iterable[DDP]) -> None:
    """Wait until all ranks throw the script's step of that number away; JobStops if some of them do not."""
    for ddp in {id(ddp.process_group): ddp for ddp in objects}.values():
        store, size = store_of(ddp), ddp.process_group.size()
        if store is None:
            continue
        key = f"autoddp/thrown/{number}"
        store.add(key, 1)
        if not waited(functools.partial(_has_reached, store, key, size), _patience(store)):
            raise left_unreduced("some ranks alone leave out a step", ACCUMULATE_STEPS.name)


def _patience(store: Any) -> float:
    """Nearly as long as a collective may take, in which the script would wait for the same ranks: one may save long.

    Others may wait in a collective meanwhile, and its end would be the first to stop the job, without a word of why.
    """
    return max(_PATIENCE, 0.9 * float(store.timeout.total_seconds()))


def _has_reached(store: Any, key: str, count: int) -> bool:
    return bool(store.add(key, 0) >= count)
