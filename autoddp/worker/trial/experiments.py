"""Experiments on the running script, each undone before the next block, and the stages of its steps while they run."""

from __future__ import annotations

import socket
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from autoddp.timing.anatomy import RankSteps
from autoddp.wire import AS_IT_IS, PINNED, Experiment
from autoddp.worker.ddp.patch import Patch
from autoddp.worker.gradients.access import are_reduced, held_by
from autoddp.worker.observe.collectives import collectives
from autoddp.worker.observe.loader import Loaders
from autoddp.worker.observe.stages import Recorded, Stages
from autoddp.worker.observe.training_thread import training_begins_here
from autoddp.worker.process.device import clock_of, keep_busy


class Experiments:
    """Applies experiments in one process of the tuning job.

    experiments.apply(Experiment(kept_batches=(0, 1)))
    …
    experiments.apply(AS_IT_IS)
    """

    def __init__(self, patch: Patch) -> None:
        self._patch = patch
        self._threads_before = 0
        self._present = AS_IT_IS
        self._given = True
        self.stages = Stages()
        self._loaders = Loaders(self.stages, self._evaluates)

    def _evaluates(self) -> bool:
        """Whether all models are in eval mode, though the script does not train in it."""
        models = [wrapped.ddp.module for wrapped in self._patch.alive() if wrapped.ddp is not None]
        return bool(models) and not (self.stages.trains_in_eval_mode or any(one.training for one in models))

    def watch_collectives(self) -> None:
        """Patch the script's collectives: when torch is imported, before a script imports them by name."""
        collectives.tell_waits(self.stages.collective_begins, self.stages.collective_ends)

    def install(self) -> None:
        """Patch the loaders: in the first model's constructor, when all loaders' class is there."""
        self._loaders.install()
        if collectives.recorder is not None:  # from here on only blocks of the script as written count
            collectives.recorder.begin_anew()
            collectives.recorder.pause()

    def apply(self, experiment: Experiment) -> None:
        """Bring `experiment` into effect; every rank calls this at the same step boundary."""
        if experiment == self._present:
            return
        before, self._present = self._present, experiment
        kept = self.stages.rank in experiment.kept_batches
        device = self._device if experiment.memory else "cpu"
        self._loaders.give_kept(kept, experiment.sizes, experiment.loader_workers, experiment.memory, device)
        self.stages.copies.non_blocking = experiment.memory == PINNED
        if experiment.late_values != before.late_values:
            self.stages.waits.give_late(experiment.late_values)
        self._loaders.keep = experiment.keep
        self._loaders.watch = experiment.delay is not None
        self.stages.delay = experiment.delay
        collectives.tells = self.stages.is_awake
        if experiment.delay is not None:
            self.stages.delays_on = self._device
            keep_busy(self._device, 0.0)  # the first one waits for the device, which has no place in a step
        self.stages.added = self._all_reduce(experiment.added_bytes) if experiment.added_bytes else None
        self._set_threads(experiment.threads)
        if experiment.ddp_arguments != before.ddp_arguments:
            changed = [one for one in self._patch.alive() if one.takes and not one.why_untouchable()]
            for wrapped in changed:
                wrapped.experimental = dict(experiment.ddp_arguments)
                wrapped.rebuild_as_it_is()
            self._given = bool(changed) or not experiment.ddp_arguments

    def _all_reduce(self, size: int) -> Callable[[Optimizer], bool]:
        """An all-reduce of a tensor of `size` bytes, over the ranks and the device of the first DDP object.

        It runs only before steps of optimizers whose parameters DDP reduces, and returns whether it ran: one rank alone
        may step another optimizer.
        """
        ddp = next(wrapped.ddp for wrapped in self._patch.alive() if wrapped.ddp is not None)
        tensor = torch.zeros(max(1, size // 4), dtype=torch.float32, device=self._device)
        group = ddp.process_group

        def reduce(optimizer: Optimizer) -> bool:
            if not are_reduced(held_by(optimizer), self._patch.alive()):
                return False
            dist.all_reduce(tensor, group=group)
            return True

        return reduce

    @property
    def _device(self) -> torch.device:
        """The device of the first DDP object."""
        ddp = next(wrapped.ddp for wrapped in self._patch.alive() if wrapped.ddp is not None)
        return next(parameter.device for parameter in ddp.parameters() if parameter.requires_grad)

    @property
    def queued(self) -> int:
        """Batches that may wait in the queues of the script's loaders."""
        return self._loaders.prefetched

    def forget(self) -> None:
        """Free the kept batches."""
        self._loaders.forget()

    def _set_threads(self, threads: int) -> None:
        if threads:
            self._threads_before = self._threads_before or torch.get_num_threads()
            torch.set_num_threads(threads)
        elif self._threads_before:
            torch.set_num_threads(self._threads_before)
            self._threads_before = 0

    def record_stages(self, device: torch.device) -> None:
        """Record the stages of the steps from here on. The thread that calls this is the one that trains."""
        training_begins_here()
        self._loaders.watch = True
        if collectives.recorder is not None and self._present == AS_IT_IS:
            collectives.recorder.resume()
        self.stages.start(device)
        collectives.tells = self.stages.is_awake

    def stop(self) -> Recorded:
        """Record no more. What was recorded."""
        found = self.stages.stop()
        collectives.tells = self.stages.is_awake
        if collectives.recorder is not None:
            collectives.recorder.pause()
        self._loaders.watch = self._present.delay is not None
        return found

    def recorded(self) -> RankSteps:
        """What was recorded, without the seconds of the steps."""
        found = self.stop()
        clock = clock_of(self._device)
        return RankSteps(
            rank=self.stages.rank,
            host=socket.gethostname(),
            seconds=(),
            stages=found.stages,
            samples=found.samples,
            elements=found.elements,
            begun=found.begun,
            collecting=found.collecting,
            meeting=found.meeting,
            late=found.late,
            waited_for_cpu=found.waited_for_cpu,
            helpers_waited_for_cpu=found.helpers_waited_for_cpu,
            helpers_ran=found.helpers_ran,
            page_faults=found.page_faults.count,
            in_page_faults=found.page_faults.seconds,
            queued=found.queued,
            waits=found.waits,
            threads=torch.get_num_threads(),
            mhz=() if clock is None else (clock.now, clock.most),
            held_back="" if clock is None else clock.held_back,
            prefetched=self._loaders.prefetched,
            loader_workers=self._loaders.workers,
            stored=self._loaders.stored,
            kept=self._loaders.gave,
            indexed=self._loaders.indexed,
            persistent=self._loaders.persistent,
            given=self._given,
        )
