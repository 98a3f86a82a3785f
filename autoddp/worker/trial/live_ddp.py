"""The list of everything that a configuration changes in a running process, for a trial and for the real job.

Each trial applies the whole list between two steps. The real job applies it once, before its first model is built; only
effects that need to observe some of the script's steps first (`Effect.after_watching`) are applied after those steps.
One list for both makes sure that what is launched is what was measured. Env settings are not in the list: trials and
jobs get them as environment variables when they start.

`LiveDdp` is the worker's `LiveModel`: it applies configurations to all of the script's DDP objects at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from autoddp.knobs import Configuration, GradientError
from autoddp.timing.anatomy import RankSteps
from autoddp.timing.timeline import Timeline
from autoddp.wire import AS_IT_IS, Experiment
from autoddp.worker.ddp.model import Model
from autoddp.worker.ddp.patch import Patch
from autoddp.worker.effects.base import Effect
from autoddp.worker.effects.binding import Binding
from autoddp.worker.effects.compiling import Compiling
from autoddp.worker.effects.threads import Threads
from autoddp.worker.gradients.access import parameters_of
from autoddp.worker.gradients.accumulation import Accumulation
from autoddp.worker.gradients.comparison import SAMPLED, Comparison
from autoddp.worker.gradients.deferred import ImplicitNoSync
from autoddp.worker.gradients.switch import ReductionSwitch
from autoddp.worker.graphs import Graphs
from autoddp.worker.hooks import Hook
from autoddp.worker.hooks.arithmetic import arithmetic_of
from autoddp.worker.observe.timeline import Recording
from autoddp.worker.process.device import devices_of, give_back_spare_memory, has_room, synchronize
from autoddp.worker.process.rank_store import RankStore
from autoddp.worker.trial.experiments import Experiments


class DdpObjects(Effect):
    """DDP's arguments and its communication hook, for the objects that exist and for those still to be built."""

    def __init__(self, patch: Patch) -> None:
        self._patch = patch

    def apply(self, configuration: Configuration) -> None:
        """See `Effect`. Any change, also of other knobs, gives each object a new reducer, so all trials begin alike."""
        live = configuration.without_variables
        if live == self._patch.configuration:
            return
        self._patch.configuration = live
        for wrapped in self._patch.alive():
            if wrapped.takes:
                wrapped.rebuild(live, self._patch.start_step, self._patch.around)


def effects_of(
    patch: Patch,
    *,
    binding: Binding,
    threads: Threads,
    implicit_no_sync: ImplicitNoSync,
    accumulation: Accumulation,
    compiling: Compiling,
    graphs: Graphs,
) -> tuple[Effect, ...]:
    """All effects, in the order in which they are applied.

    Compiling and graphs come last: compiled models are cut where DDP's buckets end, and CUDA graphs capture the result.
    """
    return (binding, threads, implicit_no_sync, accumulation, DdpObjects(patch), compiling, graphs)


class LiveDdp:
    """All DDP objects of the script. See `worker.trial.runner.LiveModel` for the contract.

    In a trial PowerSGD compresses from its first step, because its exact first steps would measure the baseline.
    """

    def __init__(
        self,
        patch: Patch,
        switch: ReductionSwitch,
        effects: Sequence[Effect],
        compiling: Compiling,
        experiments: Experiments,
    ) -> None:
        self._patch = patch
        self._switch = switch
        self._effects = effects
        self._compiling = compiling
        self._experiments = experiments
        self._comparison = Comparison()
        self._recording = Recording(patch.alive)
        patch.start_step, patch.around, patch.samples = 0, self._around, False
        for wrapped in patch.alive():
            wrapped.leave_out_samples()

    def only_what_all_have(self, ranks: RankStore) -> object:
        """See `LiveModel`."""
        return self._patch.only_what_all_have(ranks)

    def apply(self, configuration: Configuration) -> None:
        """Apply `configuration`, which is in effect from the next forward pass on."""
        self.rest()
        for effect in self._effects:
            effect.apply(configuration)

    def rest(self) -> None:
        """See `LiveModel`."""
        for device in self._devices:
            give_back_spare_memory(device)

    @property
    def compilations(self) -> int:
        """See `LiveModel`."""
        return self._compiling.compilations

    def reduce(self, on: bool) -> None:
        """Switch gradient reduction off for all objects, or on again; then all ranks get the parameters of rank 0."""
        was, self._switch.on = self._switch.on, on
        if on and not was:
            for wrapped in self._patch.alive():
                wrapped.broadcast_state()
                wrapped.forget_what_was_used()

    def experiment(self, experiment: Experiment | None) -> None:
        """See `LiveModel`."""
        self._experiments.apply(experiment or AS_IT_IS)
        if experiment is None:
            self._experiments.forget()

    def record_stages(self) -> None:
        """See `LiveModel`."""
        self._experiments.record_stages(self._devices[0])

    def step_recorded(self) -> None:
        """See `LiveModel`."""
        self._experiments.stages.lap()

    def recorded(self) -> RankSteps:
        """See `LiveModel`."""
        return self._experiments.recorded()

    def prepare_timeline(self) -> None:
        """See `LiveModel`."""
        self._recording.prepare()

    def begin_timeline(self) -> None:
        """See `LiveModel`."""
        self.record_stages()
        self._recording.begin(self._devices[0], self._experiments.stages.zero)

    def step_of_timeline(self) -> None:
        """See `LiveModel`."""
        self.step_recorded()
        self._recording.step()

    def end_timeline(self) -> Timeline:
        """See `LiveModel`."""
        found = self._experiments.stop()
        self._recording.end()
        return self._recording.taken(found.ends, found.spans, arithmetic_of(parameters_of(self._patch.alive())))

    def _around(self, hook: Hook, group: dist.ProcessGroup, _model: Model) -> Hook:
        return self._recording.around(self._comparison.around(hook, group), group)

    def compare(self, on: bool) -> None:
        """See `LiveModel`. Costs nothing if no hook of ours is in effect, because there is nothing to compare.

        Where a device has no room for the sums over the steps, which are twice as large as the gradients, they are of a
        sample: the trial would run out of memory, and the job itself never needs them.
        """
        if on:
            self._comparison.sampled = None if self._have_room_for_sums() else SAMPLED
        self._comparison.on = on

    def _have_room_for_sums(self) -> bool:
        sizes = dict.fromkeys(self._devices, 0)
        for p in parameters_of(self._patch.alive()):
            sizes[p.device] += 2 * p.numel() * p.element_size()
        return all(has_room(device, size) for device, size in sizes.items())

    def step_compared(self) -> None:
        """See `LiveModel`."""
        self._comparison.step()

    def gradient_error(self) -> GradientError | None:
        """See `LiveModel`."""
        names = {id(p): name for w in self._patch.alive() if w.ddp for name, p in w.ddp.module.named_parameters()}
        return self._comparison.result(lambda identity: names.get(identity, "?"))

    def synchronize(self) -> None:
        """See `LiveModel`."""
        for device in self._devices:
            synchronize(device)

    @property
    def _devices(self) -> list[torch.device]:
        return devices_of(p for wrapped in self._patch.alive() for p in wrapped.parameters)
