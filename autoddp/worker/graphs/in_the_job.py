"""CUDA graphs in the real job: the first steps run as written, then what they called is captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import Configuration
from autoddp.knobs.computing import CUDA_GRAPHS
from autoddp.units import data_size
from autoddp.worker.clock import StepClock
from autoddp.worker.ddp import DdpEvents, Wrapped
from autoddp.worker.device import devices_of, memory_reserved
from autoddp.worker.gradient_access import parameters_of
from autoddp.worker.graphs import Graphs
from autoddp.worker.sync_switch import ReductionSwitch

_WATCHED_STEPS = 4


class GraphsInTheJob(DdpEvents):
    """`say` hears once what became of them: of the memory they took, or of why the job goes on as written."""

    def __init__(
        self,
        graphs: Graphs,
        wrapped: Callable[[], Sequence[Wrapped]],
        switch: ReductionSwitch,
        configuration: Configuration,
        say: Callable[[str], None],
    ) -> None:
        self._graphs, self._wrapped, self._switch = graphs, wrapped, switch
        self._configuration, self._say = configuration, say
        self._steps = 0
        self._clock = StepClock(wrapped, self._on_step)

    def forward_begins(self, ddp: DDP) -> None:
        """A forward pass is about to run; whether its backward pass reduces is decided."""
        reduces = self._switch.reduces(ddp)
        self._clock.forward_begins(reduces)
        self._graphs.forward_begins(ddp, reduces)

    def stop(self) -> None:
        """The models run as written from here on. At a forward pass."""
        self._clock.stop()
        self._graphs.stop_watching()
        self._graphs.undo()

    def _memory(self) -> int:
        return sum(map(memory_reserved, devices_of(parameters_of(self._wrapped()))))

    def _on_step(self) -> None:
        self._steps += 1
        if self._steps == 1:
            self._graphs.watch()
            return
        self._graphs.step()
        if self._steps > _WATCHED_STEPS:
            self._clock.stop()
            self._graphs.stop_watching()
            self._capture()

    def _capture(self) -> None:
        before = self._memory()
        try:
            self._graphs.apply(self._configuration)
        except Exception as why:  # whatever a capture may raise: the models are as written again
            self._say(f"without CUDA graphs, as written: {str(why).splitlines()[0]}")
            return
        mode = self._configuration[CUDA_GRAPHS.name]
        self._say(f'CUDA graphs of "{mode}" are in use and take {data_size(self._memory() - before)} of memory')
