"""The script's DDP objects, turned together: the worker's `LiveModel`."""

from __future__ import annotations

import torch

from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.worker.ddp import Patch, ReductionSwitch, broadcast_parameters
from autoddp.worker.processors import Processors


class LiveDdp:
    """All DDP objects of the script. See `autoddp.knobs.LiveModel` for the contract.

    A trial measures PowerSGD from its first step: its exact first steps would be the baseline's time, not its own.
    """

    def __init__(self, patch: Patch, switch: ReductionSwitch, processors: Processors) -> None:
        self._patch = patch
        self._switch = switch
        self._processors = processors
        self._current = AS_WRITTEN

    def turn(self, configuration: Configuration) -> None:
        """Bring `configuration` into effect from the next forward on."""
        self._processors.turn(configuration)
        live = configuration.without_variables
        if live == self._current:
            return
        for wrapped in self._patch.alive():
            wrapped.rebuild(live, start_step=0)
        self._current = live

    def reduce(self, on: bool) -> None:
        """Switch gradient reduction off for all of them, or on again with the parameters of rank 0."""
        was, self._switch.on = self._switch.on, on
        if on and not was:
            for wrapped in self._patch.alive():
                if wrapped.ddp is not None:
                    broadcast_parameters(wrapped.ddp)

    def synchronize(self) -> None:
        """Wait for the device."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
