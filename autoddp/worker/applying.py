"""The real job under a recipe: DDP objects are built with the recipe's configuration."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.knobs.computing import CUDA_GRAPHS, NUMA_BINDING, REDUCE_OVERHEAD, THREADS
from autoddp.knobs.hook import HOOK
from autoddp.knobs.micro_batches import ACCUMULATE_STEPS, DEFER_REDUCTIONS
from autoddp.wire import WorkerConfig
from autoddp.worker.accumulation import Accumulation
from autoddp.worker.binding import Binding
from autoddp.worker.compiling import Compiling
from autoddp.worker.ddp import AVAILABLE_ARGUMENTS, Around, DdpEvents, Patch, Wrapped, parameters_digest
from autoddp.worker.effect import Effect
from autoddp.worker.first_steps import FirstSteps
from autoddp.worker.fitting import Expected, Fitting
from autoddp.worker.gradient_monitor import Watch
from autoddp.worker.graphs import Graphs
from autoddp.worker.graphs.in_the_job import GraphsInTheJob
from autoddp.worker.guard import Guard, guarded
from autoddp.worker.implicit_no_sync import Deferral
from autoddp.worker.live_ddp import effects_of
from autoddp.worker.sync_switch import ReductionSwitch
from autoddp.worker.threads import Threads


def start_applying(config: WorkerConfig) -> None:
    """Patch DDP so that it is built as the configuration says."""
    configuration = _without_missing(config.configuration)
    patch, switch = Patch(), ReductionSwitch()
    patch.events = applied = _Applied(configuration, _expected(config), patch, switch)
    applied.install(config)


def _expected(config: WorkerConfig) -> Expected:
    digests = tuple(config.parameters_digest.split("+")) if config.parameters_digest else ()
    return Expected(digests, config.inputs, config.recipe, config.note, config.noted, config.variables)


class _Applied(DdpEvents):
    """A recipe's configuration in this process: `install` before the script builds its first model."""

    def __init__(self, configuration: Configuration, expected: Expected, patch: Patch, switch: ReductionSwitch) -> None:
        self._effects: tuple[Effect, ...] = ()
        self._configuration = configuration
        self._digests = set(expected.digests)
        self._patch, self._switch = patch, switch
        self._fitting = Fitting(expected, switch, self._refused, _warn)
        self._deferral = Deferral(switch, patch.alive)
        self._accumulation = Accumulation(switch, patch.alive, _give_up)
        self._compiling = Compiling(patch.alive)
        self._graphs = Graphs(self._with_graphs)
        self._graphs_in_the_job: GraphsInTheJob | None = None
        self._replays = False
        self._first_steps: FirstSteps | None = None
        self._guard: Guard | None = None

    def install(self, config: WorkerConfig) -> None:
        """Patch what the configuration and its checks need, and no more."""
        patch = self._patch
        patch.around = self._fitting.around
        mode = CUDA_GRAPHS.of(self._configuration)
        self._replays = mode == REDUCE_OVERHEAD
        if mode and not self._replays:
            self._graphs_in_the_job = GraphsInTheJob(self._graphs, self._with_graphs, self._configuration, _say)
        fewer = {DEFER_REDUCTIONS.name, ACCUMULATE_STEPS.name} & set(self._configuration)
        if fewer:
            deferral = self._deferral
            self._first_steps = FirstSteps(patch.alive, deferral, _warn)
            deferral.install()
        if ACCUMULATE_STEPS.name in fewer:
            self._accumulation.install()
            self._accumulation.owes = self._deferral.owe
            self._accumulation.reads = self._deferral.reduce_what_is_missing
            self._accumulation.why_not = self._fitting.why_not
        if config.guards and guarded(self._configuration):
            self._guard = Guard(guarded(self._configuration), self._switch)
        if fewer or self._guard is not None or self._graphs_in_the_job is not None:
            self._switch.install()
        if config.watch is not None:
            patch.around = _around_both(self._fitting.around, Watch(config.watch, _warn).around)
        patch.install()

    def takes(self, module: nn.Module) -> bool:
        """Whether the recipe was measured on such a model."""
        if self._digests and parameters_digest(module) not in self._digests:
            return False
        # Once: later models find steps under way, or what the job's first steps have shown.
        if not self._effects:
            self._bring_in(module)
        return True

    def _bring_in(self, module: nn.Module) -> None:
        """At the first model; the CPUs stay those that they then are."""
        # torch itself refuses a model without parameters, a moment later.
        binding = Binding(next((p.device for p in module.parameters()), torch.device("cpu")))
        threads = Threads(os.environ.get(THREADS.variable), pinned="")
        if NUMA_BINDING.name in self._configuration and binding.why_not:
            _warn(f"the recipe's {NUMA_BINDING.name} is left out: {binding.why_not}")
        self._effects = effects_of(
            self._patch, binding, threads, self._deferral, self._accumulation, self._compiling, self._graphs
        )
        for effect in self._effects:
            if not effect.after_watching:
                effect.apply(self._configuration)

    def _with_graphs(self) -> list[Wrapped]:
        """The models that graphs may stand for: a graph's gradients have to be copied out of its buffers."""
        alive = self._patch.alive()
        return [w for w in alive if w.takes and w.ddp is not None and w.ddp.gradient_as_bucket_view]

    def built(self, wrapped: Wrapped) -> None:
        """A DDP object is built."""
        self._fitting.built(wrapped)
        if self._first_steps is not None:
            self._first_steps.built()
        self._accumulation.model_built()
        if self._guard is not None:
            self._guard.built(wrapped)

    def _refused(self, wrapped: Wrapped, all_differ: bool) -> None:
        """Back to as written, in a forward pass: the object, and what concerns the process if no model fits."""
        wrapped.takes = False
        if wrapped.is_turned:
            wrapped.rebuild(AS_WRITTEN, None)
        self._deferral.end()
        self._accumulation.stop()
        if self._guard is not None:
            self._guard.forget(wrapped)
        if not all_differ:
            return
        self._patch.configuration = AS_WRITTEN
        if self._graphs_in_the_job is not None:
            self._graphs_in_the_job.stop()
            self._graphs_in_the_job = None
        for effect in self._effects:
            if isinstance(effect, (Binding, Threads, Compiling)):
                effect.undo()

    def forward_begins(self, ddp: DDP) -> None:
        """Whether this one's reduction waits."""
        self._fitting.forward_begins(ddp)
        if self._guard is not None:
            self._guard.forward_begins(ddp)
        if self._first_steps is not None:
            self._first_steps.forward_begins()
        self._deferral.forward_begins(ddp)
        self._accumulation.forward_begins(ddp)
        if self._graphs_in_the_job is not None:
            self._graphs_in_the_job.forward_begins(ddp, self._switch.reduces(ddp))

    def called(self, ddp: DDP, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `DdpEvents`."""
        self._fitting.called(ddp, args, kwargs)
        if self._replays:
            self._compiling.replays.called(ddp, args, kwargs)

    def returned(self, ddp: DDP, what: Any) -> Any:
        """See `DdpEvents`."""
        if self._first_steps is not None:
            what = self._deferral.returned(ddp, what)
        what = self._fitting.returned(ddp, what)
        return self._compiling.replays.returned(ddp, what) if self._replays else what

    def script_registered(self, wrapped: Wrapped) -> None:
        """The script's own hook is set in place of the recipe's."""
        if HOOK.of(self._configuration):
            _warn("the script registers a communication hook of its own: it stays, the recipe's is set aside")


def _without_missing(configuration: Configuration) -> Configuration:
    missing = [name for name in configuration.ddp_arguments if name not in AVAILABLE_ARGUMENTS]
    if missing:
        _warn(f"this torch's DDP has no {', '.join(missing)}: the recipe's value is left out")
    return Configuration({k: v for k, v in configuration.items() if k not in missing})


def _around_both(outer: Around, inner: Around) -> Around:
    return lambda hook, group: outer(inner(hook, group), group)


def _give_up(why: str) -> None:
    _warn(f"each of the script's steps is one again from here on: {why}")


def _warn(text: str) -> None:
    _say(f"warning: {text}")


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"autoddp: {text}", file=sys.stderr, flush=True)
