"""Sees whether a script trains several DDP objects at the same time, in a thread each: then no step can be tuned."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.worker.ddp.handlers import DdpEvents

_IN_A_ROW = 3  # training passes of a model by one thread, and changes between such threads: they train at one time
_WHY = "the script trains several DDP models in a thread each: when a step of one ends, another is within its own"


class TrainerThreads(DdpEvents):
    """Calls `stop` with the reason where two threads train a DDP object each: no moment is a step boundary of both."""

    def __init__(self, stop: Callable[[str], object]) -> None:
        self._stop = stop
        self._passes: weakref.WeakKeyDictionary[DDP, Counter[int]] = weakref.WeakKeyDictionary()
        self._last = self._changes = 0

    def forward_begins(self, ddp: DDP) -> None:
        """See `DdpEvents`. A pool of threads may run each step in another one: of those none has several in a row."""
        here = threading.get_ident()
        if not (ddp.training and torch.is_grad_enabled()):
            return
        of_this = self._passes.get(ddp, Counter())
        self._passes[ddp] = Counter({here: of_this[here] + 1})  # what other threads have run counts no more
        if here == self._last:
            return
        self._last, self._changes = here, self._changes + 1
        alive = {thread.ident for thread in threading.enumerate()}
        often = {thread for of_one in list(self._passes.values()) for thread, n in of_one.items() if n >= _IN_A_ROW}
        if len(often & alive) > 1 and self._changes >= _IN_A_ROW:
            self._stop(_WHY)
