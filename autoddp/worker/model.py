"""The script's DDP objects, turned together: the worker's `LiveModel`."""

from __future__ import annotations

import torch

from autoddp.knobs import AS_WRITTEN, Configuration, GradientError
from autoddp.knobs.cuda_graphs import CUDA_GRAPHS, REDUCE_OVERHEAD
from autoddp.worker.accumulation import Accumulation
from autoddp.worker.compiling import Compiling
from autoddp.worker.ddp import Patch
from autoddp.worker.deferral import Deferral
from autoddp.worker.fidelity import Comparison
from autoddp.worker.graphs import Graphs
from autoddp.worker.processors import Processors
from autoddp.worker.reduction import ReductionSwitch, broadcast_parameters


class LiveDdp:
    """All DDP objects of the script. See `autoddp.knobs.LiveModel` for the contract.

    A trial measures PowerSGD from its first step: its exact first steps would be the baseline's time, not its own.
    """

    def __init__(
        self,
        patch: Patch,
        switch: ReductionSwitch,
        processors: Processors,
        deferral: Deferral,
        accumulation: Accumulation,
        graphs: Graphs,
        compiling: Compiling,
    ) -> None:
        self._patch = patch
        self._switch = switch
        self._processors = processors
        self._deferral = deferral
        self._accumulation = accumulation
        self._graphs = graphs
        self._compiling = compiling
        self._current = AS_WRITTEN
        self._comparison = Comparison()

    def turn(self, configuration: Configuration) -> None:
        """Bring `configuration` into effect from the next forward on."""
        self._processors.turn(configuration)
        self._deferral.every = int(str(configuration.get("defer_reductions", 1)))
        self._accumulation.steps = configuration.steps_per_update
        graphs = str(configuration.get(CUDA_GRAPHS.name, ""))
        self._graphs.turn("" if graphs == REDUCE_OVERHEAD else graphs)
        live = configuration.without_variables
        if live == self._current:
            return
        for wrapped in self._patch.alive():
            wrapped.rebuild(live, start_step=0, around=self._comparison.around)
        self._compiling.turn(live)
        self._current = live

    @property
    def compilations(self) -> int:
        """See `LiveModel`."""
        return self._compiling.compilations

    def reduce(self, on: bool) -> None:
        """Switch gradient reduction off for all of them, or on again with the parameters of rank 0."""
        was, self._switch.on = self._switch.on, on
        if on and not was:
            for wrapped in self._patch.alive():
                if wrapped.ddp is None:
                    continue
                broadcast_parameters(wrapped.ddp)
                wrapped.forget_what_was_used(self._current, start_step=0, around=self._comparison.around)

    def compare(self, on: bool) -> None:
        """See `LiveModel`. Where no hook of ours is in effect there is nothing to compare, and nothing to pay for."""
        self._comparison.on = on

    def step_compared(self) -> None:
        """See `LiveModel`."""
        self._comparison.step()

    def gradient_error(self) -> GradientError | None:
        """See `LiveModel`."""
        names = {id(p): name for w in self._patch.alive() if w.ddp for name, p in w.ddp.module.named_parameters()}
        return self._comparison.result(lambda identity: names.get(identity, "?"))

    def synchronize(self) -> None:
        """Wait for the device."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
