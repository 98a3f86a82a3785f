"""The real job under a recipe: DDP objects are built with the recipe's configuration."""

from __future__ import annotations

import functools
import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.errors import JobStops
from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.knobs.computing import CUDA_GRAPHS, NUMA_BINDING, REDUCE_OVERHEAD, THREADS
from autoddp.knobs.ddp_arguments import (
    ALSO_STATIC,
    BROADCAST_BUFFERS,
    FIND_UNUSED,
    GRADIENT_AS_BUCKET_VIEW,
    OF_BUCKETS,
    OWN_HOOK_SEES_BUCKETS,
    STATIC_GRAPH,
)
from autoddp.knobs.hook import DIVIDES_BY_THOSE_LEFT, HOOK
from autoddp.knobs.job import SPARSE
from autoddp.knobs.micro_batches import ACCUMULATE_STEPS, DEFER_REDUCTIONS
from autoddp.log import tell
from autoddp.wire import WorkerConfig
from autoddp.wire.started_with import started_with
from autoddp.worker.ddp.arguments import AVAILABLE_ARGUMENTS
from autoddp.worker.ddp.handlers import CAPTURES, IN_PYTHON, UNPICKLED, DdpHandlers
from autoddp.worker.ddp.model import parameters_digest
from autoddp.worker.ddp.patch import Patch, watch_joins
from autoddp.worker.ddp.unreduced import Unreduced, compare
from autoddp.worker.ddp.used_parameters import UsedParameters
from autoddp.worker.ddp.wrapped import Around, Wrapped
from autoddp.worker.effects.base import Effect
from autoddp.worker.effects.binding import Binding
from autoddp.worker.effects.compiling import Compiling
from autoddp.worker.effects.threads import Threads
from autoddp.worker.gradients.access import add_handler, keep_compilers_out
from autoddp.worker.gradients.accumulation import Accumulation
from autoddp.worker.gradients.buffers import LocalBuffers
from autoddp.worker.gradients.deferred import ImplicitNoSync
from autoddp.worker.gradients.equal_parameters import ParameterCheck, knobs_that_part_ranks
from autoddp.worker.gradients.monitor import Watch
from autoddp.worker.gradients.switch import ReductionSwitch
from autoddp.worker.gradients.views import BucketViews
from autoddp.worker.graphs import Graphs, GraphsInTheJob
from autoddp.worker.job.fitting import Expected, Fitting
from autoddp.worker.observe.first_steps import FirstSteps
from autoddp.worker.trial.live_ddp import effects_of


def start_applying(config: WorkerConfig) -> None:
    """Patch DDP so that it is built as the configuration says.

    What changes training is for the number of ranks with which it was measured. Another one runs as written, all ranks
    alike, as where the launchers know it at once.
    """
    started = int(started_with("WORLD_SIZE", "0"))
    if config.world and started not in (0, config.world):
        _warn(
            f"{config.recipe} changes training and was made for {config.world} ranks: this start has {started}, and "
            "runs as written; --force on all hosts uses it all the same"
        )
        return
    configuration = _without_missing(config.configuration)
    patch = Patch()
    switch = ReductionSwitch(patch.of)
    patch.events = applied = _Applied(configuration, _expected(config), patch, switch)
    applied.install(config)


def _expected(config: WorkerConfig) -> Expected:
    digests = tuple(config.parameters_digest.split("+")) if config.parameters_digest else ()
    noted = (config.note, config.noted)
    return Expected(digests, config.inputs, config.recipe, *noted, config.variables, config.backend)


class _Applied(DdpHandlers):
    """A recipe's configuration in this process: `install` before the script builds its first model."""

    def __init__(self, configuration: Configuration, expected: Expected, patch: Patch, switch: ReductionSwitch) -> None:
        self._effects: tuple[Effect, ...] = ()
        self._configuration = configuration
        self._digests = set(expected.digests)
        self._patch, self._switch = patch, switch
        self._fitting = Fitting(expected, switch, self._refused, _warn)
        self._implicit_no_sync = ImplicitNoSync(switch, patch.alive)
        self._implicit_no_sync.comes_early = functools.partial(_comes_early, configuration)
        self._accumulation = Accumulation(switch, patch.alive, self._implicit_no_sync, _give_up, self._fitting.why_not)
        self._compiling = Compiling(patch.alive)
        self._graphs = Graphs(self._with_graphs, switch.reduces)
        self._graphs_in_the_job: GraphsInTheJob | None = None
        self._used_parameters: UsedParameters | None = None
        self._static_without_search = False
        super().__init__([self._fitting])
        self._has_unpickled = self._has_captured = self._watches = False

    def install(self, config: WorkerConfig) -> None:
        """Patch what the configuration and its checks need, and no more."""
        configuration, patch = self._configuration, self._patch
        patch.around = self._fitting.around
        if knobs := knobs_that_part_ranks(configuration, config.variables):
            self.handlers.append(ParameterCheck(knobs, self._switch))
        if STATIC_GRAPH.of(configuration):
            stop = functools.partial(_stop, config.recipe)
            learns_none = functools.partial(_left_out, STATIC_GRAPH.name)
            self._used_parameters = UsedParameters(self._switch, patch.of, learns_none, stop)
            self._static_without_search = not config.static_graph
            self.handlers.append(self._used_parameters)
        if BROADCAST_BUFFERS.name in configuration:
            self.handlers.append(LocalBuffers(self._switch, functools.partial(_left_out_later, BROADCAST_BUFFERS.name)))
        if GRADIENT_AS_BUCKET_VIEW.of(configuration):
            left_out = functools.partial(_left_out_later, GRADIENT_AS_BUCKET_VIEW.name)
            self.handlers.append(BucketViews(self._switch, left_out))
        if DEFER_REDUCTIONS.name in configuration or ACCUMULATE_STEPS.name in configuration:
            self.handlers += [
                FirstSteps(patch.alive, self._implicit_no_sync, self._accumulation, _warn),
                self._implicit_no_sync,
                self._accumulation,
            ]
            add_handler(self._implicit_no_sync)
        if ACCUMULATE_STEPS.name in configuration:
            add_handler(self._accumulation)
        if HOOK.name in configuration:
            watch_joins(self._joins)
        mode = CUDA_GRAPHS.of(configuration)
        if mode and mode != REDUCE_OVERHEAD:
            self._graphs_in_the_job = GraphsInTheJob(self._graphs, self._with_graphs, self._switch, configuration, _say)
            self.handlers.append(self._graphs_in_the_job)
        if self.handlers[1:]:
            self._switch.install()
        self.handlers.append(
            Unreduced(patch.alive, self._switch, lambda found: compare(patch.alive(), found, _warn_all))
        )
        if mode == REDUCE_OVERHEAD:
            self.handlers.append(self._compiling.replays)
        if config.watch is not None:
            self._watches = HOOK.name in configuration
            patch.around = _around_both(self._fitting.around, Watch(config.watch, _warn).around)
        patch.install()

    def takes(self, module: nn.Module) -> bool:
        """Whether the recipe was measured on such a model."""
        if self._digests and parameters_digest(module) not in self._digests:
            return False
        # Once: when a later model is built, some effects may have been given up for what the first steps have shown.
        if not self._effects:
            self._bring_in(module)
        return True

    def _bring_in(self, module: nn.Module) -> None:
        """Called before the first model is built: the process keeps the CPUs that are right for its device."""
        # torch itself refuses a model without parameters, a moment later.
        binding = Binding(next((p.device for _, p in module.named_parameters()), torch.device("cpu")))
        threads = Threads(os.environ.get(THREADS.variable), pinned="")
        if NUMA_BINDING.name in self._configuration and binding.why_not:
            _left_out(NUMA_BINDING.name, binding.why_not)
        self._effects = effects_of(
            self._patch,
            binding=binding,
            threads=threads,
            implicit_no_sync=self._implicit_no_sync,
            accumulation=self._accumulation,
            compiling=self._compiling,
            graphs=self._graphs,
        )
        for effect in self._effects:
            if not effect.after_watching:
                effect.apply(self._configuration)

    def _with_graphs(self) -> list[Wrapped]:
        """The models that graphs may stand for: a graph's gradients have to be copied out of its buffers."""
        alive = self._patch.alive()
        return [w for w in alive if w.takes and w.ddp is not None and w.ddp.gradient_as_bucket_view]

    def built(self, wrapped: Wrapped) -> None:
        """See `DdpEvents`."""
        keep_compilers_out()
        if wrapped.takes and wrapped.is_sparse and HOOK.of(self._configuration):
            _left_out(HOOK.name, SPARSE)
        # Tuned without that search, so nobody has agreed to a job that stops where a parameter is unused.
        if self._static_without_search and wrapped.arguments.get(FIND_UNUSED):
            has_its_own = bool(wrapped.arguments.get(STATIC_GRAPH.name))  # that one stays
            if wrapped.leave_out_static_graph() and not has_its_own:
                why = f"the script sets {FIND_UNUSED}, and did not when tuned"
                _left_out(STATIC_GRAPH.name, f"{why}; tune it with --trials 20 {ALSO_STATIC} to have it tried")
        super().built(wrapped)

    def _refused(self, wrapped: Wrapped, all_differ: bool) -> None:
        """Back to as written, in a forward pass: the object, and what concerns the process if no model fits."""
        wrapped.takes = False
        self.forget(wrapped)
        wrapped.broadcast_buffers()
        if wrapped.is_changed:
            wrapped.rebuild(AS_WRITTEN, None)
        self._implicit_no_sync.end()
        self._accumulation.stop()
        if not all_differ:
            return
        self._patch.configuration = AS_WRITTEN
        if self._graphs_in_the_job is not None:
            self._graphs_in_the_job.stop()
        for effect in self._effects:
            if isinstance(effect, (Binding, Threads, Compiling)):
                effect.undo()

    def unknown_trains(self) -> None:
        """See `DdpEvents`. Said once."""
        if not self._has_unpickled:
            self._has_unpickled = True
            _warn(f"{UNPICKLED}: that one runs as written, without the recipe")

    def python_reduces(self) -> None:
        """See `DdpEvents`."""
        _warn(f"{IN_PYTHON}: that one runs as written, without the recipe")

    def _joins(self, ddp: DDP) -> None:
        """The script enters `join()`, and from some step on DDP is to divide by fewer ranks than a hook does."""
        wrapped = self._patch.of(ddp)
        if wrapped is not None and wrapped.leave_out_hook():
            _left_out_later(HOOK.name, DIVIDES_BY_THOSE_LEFT)

    def script_captures(self, ddp: DDP) -> None:
        """See `DdpEvents`."""
        super().script_captures(ddp)
        if self._watches and not self._has_captured:
            _warn(f"{CAPTURES}: the gradient monitor does not see what the graph repeats")
        self._has_captured = True

    def script_registered(self, wrapped: Wrapped) -> None:
        """The script's own hook is set in place of the recipe's."""
        of_buckets = (name for name in OF_BUCKETS if name in self._configuration)
        left_out = list(of_buckets) if wrapped.takes and wrapped.hook_sees_buckets else []
        for name in left_out:
            _left_out(name, OWN_HOOK_SEES_BUCKETS)
        if STATIC_GRAPH.name in left_out and self._used_parameters is not None:
            self._used_parameters.forget(wrapped)
        super().script_registered(wrapped)
        if HOOK.of(self._configuration):
            _warn("the script registers a communication hook of its own: it stays, the recipe's is set aside")


def _without_missing(configuration: Configuration) -> Configuration:
    kept = configuration.without(configuration.ddp_arguments.keys() - AVAILABLE_ARGUMENTS)
    missing = [name for name in configuration if name not in kept]
    if missing:
        _warn(f"left out of the recipe, because this version of torch cannot have it: {', '.join(missing)}")
    return kept


def _around_both(outer: Around, inner: Around) -> Around:
    return lambda hook, group, model: outer(inner(hook, group, model), group, model)


def _left_out(name: str, why: str) -> None:
    _warn(f"the recipe's {name} is left out: {why}")


def _left_out_later(name: str, why: str) -> None:
    _warn(f"the recipe's {name} is left out from here on: {why}")


def _stop(recipe: str, why: str) -> None:
    """End the job in a backward pass; whichever rank has found the reason says so.

    Tuning again is no way out: it sees the script's first steps, in which every parameter was used, and finds the same.
    """
    # Under --allow an entry of the ladder is launched, and where [configuration] is empty too.
    without = f"take {STATIC_GRAPH.name} out of {recipe}, from [configuration] and from each [[ladder]]"
    text = f"the recipe's {why}: the job stops; {without}, or launch it without the recipe (--trials 0)"
    tell(text)
    raise JobStops(f"autoddp: {text}")


def _comes_early(configuration: Configuration) -> None:
    # Those under the script's own `no_sync` do not count: it may have that since.
    passes = f"the {DEFER_REDUCTIONS.of(configuration)} backward passes with a reduction that they had when tuned"
    why = f"steps have fewer than {passes}"
    _warn(f"the recipe's {DEFER_REDUCTIONS.name} only delays here: {why}; tune it with --trials 20")


def _give_up(why: str) -> None:
    _warn(f"each of the script's steps is one again from here on: {why}")


@functools.cache  # a script may build many models, for each of which the same is to be said
def _warn(text: str) -> None:
    _say(f"warning: {text}")


def _warn_all(text: str) -> None:
    """Print a warning, on whichever rank has found the reason."""
    tell(f"warning: {text}")


def _say(text: str) -> None:
    if started_with("RANK", "0") == "0":
        tell(text)
