"""CUDA graphs of the script's models: captured between two steps, checked, and taken back without a trace.

`torch.cuda.make_graphed_callables` captures; what is here decides when its graphs may stand in for the module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.errors import first_line
from autoddp.knobs import Configuration
from autoddp.knobs.computing import BLOCKS, CUDA_GRAPHS, WHOLE_MODEL
from autoddp.units import data_size
from autoddp.worker.ddp.handlers import DdpEvents
from autoddp.worker.ddp.wrapped import Wrapped
from autoddp.worker.effects.base import Effect
from autoddp.worker.gradients.access import parameters_of
from autoddp.worker.gradients.switch import ReductionSwitch
from autoddp.worker.graphs.capture import Make, Sample, capture
from autoddp.worker.graphs.observed_calls import Watching, why_of_ignored
from autoddp.worker.graphs.replay import Replay, SharedMemory
from autoddp.worker.observe.step_clock import StepClock
from autoddp.worker.process.device import devices_of, memory_reserved

MODES = (WHOLE_MODEL, BLOCKS)
_WATCHED_STEPS = 4  # in the real job, before what they called is captured


class Graphs(Effect, DdpEvents):
    """CUDA graphs of all DDP models: `watch()`, steps with `step()` after each, `stop_watching()`, `set_mode(mode)`.

    `reduces` says of a DDP object whether its present forward pass reduces.
    """

    after_watching = True

    def __init__(
        self,
        wrapped: Callable[[], Sequence[Wrapped]],
        reduces: Callable[[DDP], bool],
        make: Make = torch.cuda.make_graphed_callables,
    ) -> None:
        self._wrapped, self._reduces, self._make = wrapped, reduces, make
        self._watching: Watching | None = None
        self._samples: dict[str, list[Sample]] = {}
        self._replays: list[Replay] = []
        self._captured = self._mode = ""
        self.why_not: dict[str, str] = {}
        """Mode → why it cannot be turned on, after `stop_watching`; "" if it can. Empty if nothing was watched."""

    def watch(self) -> None:
        """See how the models are called from here on."""
        # A compiled model has torch.compile's own graphs, and would be compiled again for whatever watches it.
        self._watching = Watching([w.ddp.module for w in self._wrapped() if w.ddp is not None and not w.is_compiled])

    def step(self) -> None:
        """A step that was watched is over."""
        if self._watching is not None:
            self._watching.step()

    def stop_watching(self) -> None:
        """Decide by the watched steps what may be captured. Without any, nothing changes."""
        if self._watching is None:
            return
        self._watching.stop()
        ignored = why_of_ignored(self._wrapped())
        self.why_not = {mode: ignored or self._watching.why_not(mode) for mode in MODES}
        self._samples = {mode: self._watching.samples(mode) for mode in MODES if not self.why_not[mode]}
        self._watching = None

    def forward_begins(self, ddp: DDP) -> None:
        """See `DdpEvents`. Graphs serve only where DDP will reduce the gradients and copy them out."""
        serves = bool(self._mode) and self._reduces(ddp) and ddp.gradient_as_bucket_view
        for replay in self._replays:
            replay.arm(ddp.module, serves)

    def apply(self, configuration: Configuration) -> None:
        """See `Effect`. What torch.compile replays is not captured here."""
        mode = CUDA_GRAPHS.of(configuration) or ""
        self.set_mode(mode if mode in MODES else "")

    def set_mode(self, mode: str) -> None:
        """ "model", "blocks", or "" for none; at a step boundary. Captured graphs are kept while none other is wanted.

        Raises RuntimeError, and leaves the models as written, where a graph cannot be captured.
        """
        if mode == self._mode:
            return
        for replay in self._replays:
            replay.leave()
        self._mode = ""
        if not mode:
            return
        if mode != self._captured:
            self._replays, self._captured = [], ""  # gives their memory back before more is taken
            self._replays, self._captured = self._capture(mode), mode
        for replay in self._replays:
            replay.stand()
        self._mode = mode

    def forget_dropped(self, trained: nn.Module) -> None:
        """The script trains this model: if no graph is of it, give back the graphs of models that it has dropped.

        Each graph holds its model, and memory for all that a pass keeps. A next model would not find room beside it.
        """
        if not self._replays or any(replay.is_of(trained) for replay in self._replays):
            return
        there = [w.ddp.module for w in self._wrapped() if w.ddp is not None]
        dropped = [replay for replay in self._replays if not any(map(replay.is_of, there))]
        for replay in dropped:
            replay.leave()
        self._replays = [replay for replay in self._replays if replay not in dropped]
        self._samples = {
            mode: [sample for sample in samples if any(sample.model is model for model in there)]
            for mode, samples in self._samples.items()
        }

    @property
    def replayed(self) -> int:
        """Forward passes that graphs have served since the last capture; each block counts."""
        return sum(replay.replayed for replay in self._replays)

    def _capture(self, mode: str) -> list[Replay]:
        if mode not in self._samples:
            raise RuntimeError(f'no CUDA graphs of "{mode}": {self.why_not.get(mode, "no step was watched")}')
        return [replay for samples in _of_each_model(self._samples[mode]) for replay in self._replays_of(samples)]

    def _replays_of(self, samples: Sequence[Sample]) -> list[Replay]:
        graphed, memory = capture(samples, self._make), SharedMemory()
        return [Replay(s, call, memory, n) for n, (s, call) in enumerate(zip(samples, graphed, strict=True))]


def _of_each_model(samples: Sequence[Sample]) -> list[list[Sample]]:
    """One capture for each: what is captured together shares memory, and may only run in the order of its capture.

    Several models run in an order of the script's: while a GAN's generator waits for its backward pass, the
    discriminator may have two.
    """
    of_each: dict[int, list[Sample]] = {}
    for sample in samples:
        of_each.setdefault(id(sample.model), []).append(sample)
    return list(of_each.values())


class GraphsInTheJob(DdpEvents):
    """CUDA graphs in the real job: the first steps run as written, then what they called is captured.

    `say` is called once, with the memory that the graphs take, or with the reason why the job goes on without them.
    """

    def __init__(
        self,
        graphs: Graphs,
        wrapped: Callable[[], Sequence[Wrapped]],
        switch: ReductionSwitch,
        configuration: Configuration,
        say: Callable[[str], None],
    ) -> None:
        self._graphs, self._wrapped = graphs, wrapped
        self._configuration, self._say = configuration, say
        self._steps = 0
        self._clock = StepClock(wrapped, self._on_step, switch.reduces)

    def forward_begins(self, ddp: DDP) -> None:
        """A forward pass is about to run; whether its backward pass reduces is decided."""
        self._clock.forward_begins(ddp)
        self._graphs.forget_dropped(ddp.module)
        self._graphs.forward_begins(ddp)

    def stop(self) -> None:
        """The models run as written from here on; called in a forward pass."""
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
            self._say(f"without CUDA graphs, as written: {first_line(why)}")
            return
        mode = self._configuration[CUDA_GRAPHS.name]
        self._say(f'CUDA graphs of "{mode}" are in use and take {data_size(self._memory() - before)} of memory')
