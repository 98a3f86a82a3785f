"""The real job under a recipe: DDP objects are built with the recipe's configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.knobs.binding import NUMA_BINDING
from autoddp.knobs.cuda_graphs import CUDA_GRAPHS, REDUCE_OVERHEAD
from autoddp.knobs.micro_steps import ACCUMULATE_STEPS, DEFER_REDUCTIONS
from autoddp.knobs.optimize_ddp import OPTIMIZE_DDP
from autoddp.worker.accumulation import Accumulation
from autoddp.worker.binding import Binding
from autoddp.worker.ddp import AVAILABLE_ARGUMENTS, Patch, Wrapped, parameters_digest
from autoddp.worker.deferral import Deferral
from autoddp.worker.first_steps import FirstSteps
from autoddp.worker.graphs import Graphs
from autoddp.worker.graphs.in_the_job import GraphsInTheJob
from autoddp.worker.graphs.reduce_overhead import ReduceOverhead
from autoddp.worker.guard import Guard, guarded
from autoddp.worker.order import Order
from autoddp.worker.reduction import ReductionSwitch
from autoddp.worker.torch_compile import TorchCompile
from autoddp.worker.watch import Watch, WatchPlan


def start_applying(order: Order) -> None:
    """Patch DDP so that it is built as the order says."""
    patch, switch = Patch(), ReductionSwitch()
    deferral = Deferral(switch, patch.alive)
    accumulation = Accumulation(switch, patch.alive, _give_up)
    configuration = Configuration(order.configuration)
    recipe = _Applied(configuration, order.parameters_digest, switch, deferral, accumulation)

    def by_the_recipe() -> list[Wrapped]:
        """Models that run as written have no buckets that copy a graph's gradients out."""
        return [w for w in patch.alive() if w.ddp is not None and w.ddp.gradient_as_bucket_view]

    mode = str(order.configuration.get(CUDA_GRAPHS.name, ""))
    if mode == REDUCE_OVERHEAD:
        replays = ReduceOverhead(patch.alive)
        replays.on = True
        patch.called, patch.returned = replays.called, replays.returned
    elif mode:
        recipe.graphs = GraphsInTheJob(Graphs(by_the_recipe), by_the_recipe, mode, _say)
    fewer = {DEFER_REDUCTIONS.name, ACCUMULATE_STEPS.name} & set(order.configuration)
    if fewer:
        recipe.first_steps = FirstSteps(patch.alive, deferral, _warn)
        deferral.install()
        patch.returned = deferral.returned if patch.returned is None else _both(deferral.returned, patch.returned)
    if ACCUMULATE_STEPS.name in order.configuration:
        accumulation.install()
        accumulation.owes = deferral.owe
        accumulation.reads = deferral.reduce_what_is_missing
    if order.guards and guarded(configuration):
        recipe.guard = Guard(guarded(configuration), switch)
    if fewer or recipe.guard is not None or recipe.graphs is not None:
        patch.forward_begins = recipe.forward_begins
        switch.install()
    patch.built = recipe.built
    patch.configuration = recipe.for_module
    patch.script_registered = recipe.set_hook_aside
    if order.watch:
        patch.around = Watch(WatchPlan(**order.watch), _warn).around
    patch.install()


class _Applied:
    def __init__(
        self,
        configuration: Configuration,
        digests: str,
        switch: ReductionSwitch,
        deferral: Deferral,
        accumulation: Accumulation,
    ) -> None:
        self._switch, self._deferral, self._accumulation = switch, deferral, accumulation
        missing = [name for name in configuration.ddp_arguments if name not in AVAILABLE_ARGUMENTS]
        if missing:
            _warn(f"this torch's DDP has no {', '.join(missing)}: the recipe's value is left out")
        self._configuration = Configuration({k: v for k, v in configuration.items() if k not in missing})
        self._is_bound = self._begun = False
        self.graphs: GraphsInTheJob | None = None
        self.first_steps: FirstSteps | None = None
        self.guard: Guard | None = None
        self._digests = set(digests.split("+")) if digests else set()

    def for_module(self, module: nn.Module) -> Configuration:
        """The recipe's configuration, for the models it was measured on."""
        if self._digests and parameters_digest(module) not in self._digests:
            _warn("this model's parameters are not the recipe's: it runs as written; tune again with --trials 20")
            return AS_WRITTEN
        self._bind(module)
        if not self._begun:
            # Later models find steps under way, or what the job's first steps have shown.
            self._begun = True
            self._deferral.every = int(str(self._configuration.get(DEFER_REDUCTIONS.name, 1)))
            self._accumulation.steps = self._configuration.steps_per_update
        if OPTIMIZE_DDP.name in self._configuration:
            TorchCompile().cut(bool(self._configuration[OPTIMIZE_DDP.name]))
        return self._configuration

    def built(self, wrapped: Wrapped) -> None:
        """A DDP object is built."""
        if self.first_steps is not None:
            self.first_steps.built()
        if self.guard is not None:
            self.guard.built(wrapped)

    def forward_begins(self, ddp: DDP) -> None:
        """Whether this one's reduction waits."""
        if self.guard is not None:
            self.guard.forward_begins(ddp)
        if self.first_steps is not None:
            self.first_steps.forward_begins()
        self._deferral.forward_begins(ddp)
        self._accumulation.forward_begins(ddp)
        if self.graphs is not None:
            self.graphs.forward_begins(ddp, self._switch.reduces(ddp))

    def _bind(self, module: nn.Module) -> None:
        """At the first model; the CPUs stay those that they then are."""
        if NUMA_BINDING.name not in self._configuration or self._is_bound:
            return
        self._is_bound = True
        binding = Binding(next(module.parameters()).device)
        binding.turn(True)
        if binding.why_not:
            _warn(f"the recipe's {NUMA_BINDING.name} is left out: {binding.why_not}")

    def set_hook_aside(self, wrapped: Wrapped) -> None:
        if "hook" in self._configuration:
            _warn("the script registers a communication hook of its own: it stays, the recipe's is set aside")


def _both(first: Callable[[DDP, Any], Any], second: Callable[[DDP, Any], Any]) -> Callable[[DDP, Any], Any]:
    return lambda ddp, what: second(ddp, first(ddp, what))


def _give_up(why: str) -> None:
    _warn(f"each of the script's steps is one again from here on: {why}")


def _warn(text: str) -> None:
    _say(f"warning: {text}")


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"autoddp: {text}", file=sys.stderr, flush=True)
