"""A worker of the tuning job: it watches the script's first steps, then applies what the launcher's study asks for."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_post_hook

from autoddp.isolation.stopping import stopper
from autoddp.knobs import Configuration, ObservedSteps
from autoddp.knobs.ddp_arguments import GRADIENT_AS_BUCKET_VIEW, STATIC_GRAPH
from autoddp.wire import LauncherClient, WorkerConfig
from autoddp.wire.started_with import started_with
from autoddp.worker.ddp.handlers import CAPTURES, IN_PYTHON, PASSES_BY, UNPICKLED, DdpHandlers
from autoddp.worker.ddp.inputs import InputsSeen
from autoddp.worker.ddp.model import parameters_digest
from autoddp.worker.ddp.patch import Patch, watch_uneven_inputs
from autoddp.worker.ddp.private import divides_by_those_left, is_joining
from autoddp.worker.ddp.unreduced import STEPS as UNREDUCED_STEPS
from autoddp.worker.ddp.unreduced import Unreduced
from autoddp.worker.ddp.used_parameters import UsedParameters
from autoddp.worker.ddp.wrapped import Wrapped, why_another_world
from autoddp.worker.effects.base import Effect
from autoddp.worker.effects.binding import Binding
from autoddp.worker.effects.compiling import Compiling
from autoddp.worker.effects.threads import Threads
from autoddp.worker.gradients.access import add_handler, keep_compilers_out, parameters_of
from autoddp.worker.gradients.accumulation import Accumulation
from autoddp.worker.gradients.deferred import ImplicitNoSync
from autoddp.worker.gradients.equal_parameters import checksum
from autoddp.worker.gradients.switch import ReductionSwitch
from autoddp.worker.gradients.views import BucketViews
from autoddp.worker.graphs import Graphs
from autoddp.worker.observe.first_steps import ByHand, KeepsGradients, ReadsGradients, ReadyOrder
from autoddp.worker.observe.kernel_accounts import PageFaultCount
from autoddp.worker.observe.step_clock import StepClock
from autoddp.worker.observe.stopwatch import Stopwatch
from autoddp.worker.process.device import Backlog, why_not_timed
from autoddp.worker.process.ending import leave, leave_at_the_end_of_training, leave_unless_heard
from autoddp.worker.process.heartbeat import ask_the_device
from autoddp.worker.process.rank_store import RankStore
from autoddp.worker.trial.describe_job import gather_facts
from autoddp.worker.trial.experiments import Experiments
from autoddp.worker.trial.live_ddp import LiveDdp, effects_of
from autoddp.worker.trial.runner import LauncherDirector, TrialRunner
from autoddp.worker.trial.trainer_threads import TrainerThreads

_WATCHED_STEPS = 4  # before anything is measured: the first may differ, and three more show whether all steps are alike
_UNEVEN = "inside join() a rank has no more inputs while others have: from then on its steps cannot be measured"
_OTHER_GROUPS = 60.0  # seconds that ranks may take longer to their first steps than those of another group
_STEPS_WITHOUT_DDP = 20  # of an optimizer on each rank: most scripts that train with DDP have built their model by then
_PREPARES = 30.0  # seconds from then on in which all ranks may warm up, or train something small, before DDP
_TOGETHER = 2  # steps after which all ranks leave, from the one in which a rank sees that all have made so many
_ALONE = 120.0  # seconds from then on in which one rank may train alone: some warm up, or find their rate, on rank 0


def start_tuning(config: WorkerConfig, launcher: LauncherClient, threads_given: str | None) -> None:
    """Patch DDP and wait for the script to build one.

    `threads_given`: OMP_NUM_THREADS as the process was started; "" where the script has set it, also to that value.
    """
    patch = Patch()
    switch = ReductionSwitch(patch.of)
    threads = Threads(threads_given, config.threads_pinned)
    threads.watch()
    job = _TuningJob(config, launcher, patch, switch, threads)
    patch.events = job
    switch.script_prepares, switch.learns_again = job.script_prepares, True
    patch.install()
    switch.install()
    job.experiments.watch_collectives()
    # A rank without inputs takes no orders, so the others would wait for it until they count as hung.
    watch_uneven_inputs(lambda: stopper(config.socket)(_UNEVEN))
    add_handler(job.implicit_no_sync)
    add_handler(job.experiments.stages)
    if config.accumulates:
        add_handler(job.accumulation)
    leave_at_the_end_of_training(launcher, lambda: job.wrapped_any)


class _TuningJob(DdpHandlers):
    """The tuning job in a worker, from the first DDP object to the last trial."""

    def __init__(
        self, config: WorkerConfig, launcher: LauncherClient, patch: Patch, switch: ReductionSwitch, threads: Threads
    ) -> None:
        self._config = config
        self._threads = threads
        self._launcher = launcher
        self._started = int(started_with("WORLD_SIZE", "0"))
        self.wrapped_any = False
        """Whether the script has built a DDP object in this process."""
        self._patch = patch
        self._switch = switch
        self.implicit_no_sync = ImplicitNoSync(switch, patch.alive)
        self.accumulation = Accumulation(switch, patch.alive, self.implicit_no_sync, _fail)
        self._graphs = Graphs(patch.alive, switch.reduces)
        self.compiling = Compiling(patch.alive)
        self.experiments = Experiments(patch)
        self._unreduced = Unreduced(patch.alive, switch)
        not_static = functools.partial(_fail_with, STATIC_GRAPH.name)
        self._used_parameters = UsedParameters(switch, patch.of, not_static, _fail_without_gradients)
        self._inputs = InputsSeen(patch.of, switch.as_written)
        self._measured: set[str] = set()
        self._forwards: list[int] = []
        self._ready_order: ReadyOrder | None = None
        self._runner: TrialRunner | None = None
        self._without_ddp_since: float | None = None
        """When this rank had made so many steps that it may train without DDP."""
        self._ranks_without_ddp: RankStore | None = None
        self._clock = StepClock(patch.alive, self._on_step, switch.as_written)
        super().__init__(
            [
                TrainerThreads(stopper(config.socket)),
                self._clock,  # early: a forward pass may end a step, and what changes then holds for that pass already
                self._inputs,
                self.implicit_no_sync,
                self.accumulation,
                self._graphs,  # serve passes that reduce: the two before it decide which do
                self.experiments.stages,
                self._unreduced,
                self._used_parameters,
                BucketViews(switch, functools.partial(_fail_with, GRADIENT_AS_BUCKET_VIEW.name)),
            ]
        )
        if config.cuda_graphs:  # last: the others are given what the module itself has returned
            self.handlers.append(self.compiling.replays)
        register_optimizer_step_post_hook(lambda *_: self._leave_if_no_ddp())

    def built(self, wrapped: Wrapped) -> None:
        """The first DDP object: this process takes part from here on."""
        keep_compilers_out()
        for one in self.handlers:
            if one is not self.accumulation:  # what a trial measures stays, whichever model is trained next
                one.built(wrapped)
        if not self.wrapped_any:
            self.wrapped_any = True
            self.experiments.install()
            leave_unless_heard(self._launcher)
        ddp = wrapped.ddp
        why = why_another_world(ddp, self._started) if ddp is not None else ""
        if why:  # ranks that this launcher has not started take no orders, and the others would wait for them
            stopper(self._config.socket)(f"{why}: such a job cannot be measured")
        if why := next(filter(None, (why_not_timed(parameter.device) for parameter in wrapped.parameters)), ""):
            stopper(self._config.socket)(why)

    def unknown_trains(self) -> None:
        """See `DdpEvents`. Its steps cannot be measured, so tuning ends."""
        self._launcher.hello()  # the script trains with DDP, even if it has built no object in this process
        stopper(self._config.socket)(f"{UNPICKLED}: no configuration can be applied to that one")

    def python_reduces(self) -> None:
        """See `DdpEvents`. Tuning ends."""
        self._launcher.hello()
        stopper(self._config.socket)(f"{IN_PYTHON}: no configuration can be applied to that one")

    def script_captures(self, ddp: DDP) -> None:
        """See `DdpEvents`. Tuning ends: another configuration would free the buckets that the graph writes into."""
        stopper(self._config.socket)(f"{CAPTURES}: no configuration can be applied to what it repeats")

    def script_prepares(self, reducer: object) -> None:
        """See `ReductionSwitch`. Tuning ends: such a pass is not seen, and would count as one that reduces nothing."""
        if any(w.ddp is not None and w.ddp.reducer is reducer for w in self._patch.alive()):
            stopper(self._config.socket)(f"{PASSES_BY}: such passes cannot be measured")

    def takes(self, module: nn.Module) -> bool:
        """Whether a new model gets the present configuration: later, only such models as were measured."""
        return not self._measured or parameters_digest(module) in self._measured

    def _leave_if_no_ddp(self) -> None:
        steps = self._clock.steps_without_ddp
        if self.wrapped_any or steps < _STEPS_WITHOUT_DDP or self._config.diagnoses:
            return
        self._without_ddp_since = self._without_ddp_since or time.monotonic()
        seconds = time.monotonic() - self._without_ddp_since
        if seconds < _PREPARES:
            return
        if started_with("TORCHELASTIC_USE_AGENT_STORE", "") != "True":  # rank 0 may be yet to make the store
            leave()
        self._ranks_without_ddp = self._ranks_without_ddp or RankStore()
        # All behind the same step: one that left first would fail the others' next collective.
        last = self._ranks_without_ddp.once_all_have("trained without DDP", steps + _TOGETHER)
        if seconds > _ALONE or (last is not None and steps >= last):
            leave()

    def _on_step(self) -> None:
        self._launcher.steps = self._clock.steps
        if self._runner is not None:
            self._runner.on_step()
            return
        if self._ready_order is None:
            self._ready_order = ReadyOrder(self._all_parameters())
            self.handlers.insert(0, self._ready_order)
            self._by_hand = ByHand(self._all_parameters())
            self._keeps_gradients = KeepsGradients(self._parameters_without_views())
            self._reads_gradients = ReadsGradients(self._all_parameters())
            self._observed_since, self._page_faults = time.perf_counter(), PageFaultCount()
            self.implicit_no_sync.reads, self.implicit_no_sync.has_read = self._reads, self._by_hand.has_read
            if self._config.cuda_graphs:
                self._graphs.watch()
                self.compiling.replays.watch()
            return
        self._ready_order.step()
        self._graphs.step()
        self.compiling.replays.step()
        self._forwards.append(self._clock.forwards)
        # Where nothing has reduced so far, it takes longer to tell local SGD from a script that never does.
        if len(self._forwards) > (_WATCHED_STEPS if any(self._forwards) else UNREDUCED_STEPS):
            self._ready_order.stop()
            self.handlers.remove(self._ready_order)
            self._by_hand.stop()
            self._keeps_gradients.stop()
            self._reads_gradients.stop()
            self.implicit_no_sync.reads, self.implicit_no_sync.has_read = lambda _given: None, lambda: None
            self._graphs.stop_watching()
            self.compiling.replays.stop_watching()
            self._begin()

    def _reads(self, given: Sequence[torch.Tensor]) -> None:
        """A function of torch is about to read gradients."""
        self._by_hand.reads()
        self._keeps_gradients.reads()
        self._reads_gradients.reads(given)

    def _all_parameters(self) -> list[nn.Parameter]:
        return parameters_of(self._patch.alive())

    def _parameters_without_views(self) -> list[nn.Parameter]:
        """Parameters of the DDP objects for which the script does not set `gradient_as_bucket_view`.

        With that argument DDP itself holds the memory of all gradients.
        """
        return parameters_of(w for w in self._patch.alive() if not w.arguments.get(GRADIENT_AS_BUCKET_VIEW.name))

    def _wait_for_ranks_of_other_groups(self, ranks: RankStore, wrapped: Sequence[Wrapped]) -> None:
        """End tuning if some ranks train nothing: they may make data for the others, or evaluate, in the same world.

        Ranks of one group have all made their first steps when one has.
        """
        if any(w.ddp is not None and w.ddp.process_group.size() == ranks.world_size for w in wrapped):
            return
        missing = ranks.missing(_OTHER_GROUPS)
        if missing:
            which = ", ".join(map(str, missing))
            stopper(self._config.socket)(
                f"rank {which} has not trained a DDP model {_OTHER_GROUPS:.0f} s after the others: only a job in which "
                "all ranks do can be measured"
            )

    def _checksum(self, wrapped: Sequence[Wrapped]) -> str:
        """See `ObservedSteps.parameters`. Ranks may differ on purpose as they may for `ParameterCheck`."""
        alike = [w for w in wrapped if w.ddp is not None and w.script_hook is None and not is_joining(w.ddp)]
        of_all = [p for w in alike if w.ddp and w.ddp.process_group.size() == self._started for p in w.parameters]
        return checksum(of_all) if of_all and all(self._forwards[1:]) else ""

    def _observed(self, wrapped: Sequence[Wrapped]) -> ObservedSteps:
        """What was seen of the script's first steps on this rank."""
        assert self._ready_order is not None
        one_forward_each = all(count == len(wrapped) for count in self._forwards[1:])
        compiled = self.compiling.concerns
        return ObservedSteps(
            is_static=self._ready_order.is_static and one_forward_each,
            forwards=tuple(self._forwards[1:]),
            steps_by_closure=self.implicit_no_sync.steps_by_closure,
            clears=self.accumulation.clears,
            one_optimizer=self.accumulation.one_optimizer,
            why_no_graphs=self.compiling.replays.why_not if compiled else self._graphs.why_not,
            changes_gradients=self._by_hand.found,
            changes_gradients_later=self._by_hand.found_later,
            steps_others=self.accumulation.steps_others,
            joins=any(is_joining(w.ddp) for w in wrapped if w.ddp is not None),
            divides_by_those_left=any(divides_by_those_left(w.ddp) for w in wrapped if w.ddp is not None),
            compiled=compiled,
            uses_all=self._ready_order.uses_all,
            discards_gradients=self._by_hand.discards or self._reads_gradients.between,
            keeps_gradients=self._keeps_gradients.found,
            reads_gradients=self._reads_gradients.found,
            passes=self._ready_order.passes,
            parameters=self._checksum(wrapped),
            unreduced=tuple(self._unreduced.checksums),
        )

    def _begin(self) -> None:
        in_page_faults = self._page_faults.taken().seconds / (time.perf_counter() - self._observed_since)
        ranks = RankStore()
        self._wait_for_ranks_of_other_groups(ranks, self._patch.alive())
        models = self._patch.only_what_all_have(ranks)
        wrapped = self._patch.alive()
        device = next(iter(self._all_parameters())).device
        ask_the_device(Backlog(device).is_stuck)
        binding = Binding(device)
        facts = gather_facts(
            wrapped,
            ranks,
            threads=self._threads,
            binding=binding,
            observed=self._observed(wrapped),
            in_page_faults=in_page_faults,
            config=self._config,
        )
        del models
        director = LauncherDirector(self._launcher, facts)
        self.compiling.begin()
        self._measured = set(facts.parameters_digest.split("+"))
        effects = effects_of(
            self._patch,
            binding=binding,
            threads=self._threads,
            implicit_no_sync=self.implicit_no_sync,
            accumulation=self.accumulation,
            compiling=self.compiling,
            graphs=self._graphs,
        )
        effects = (*effects, _CountedGradients(self._used_parameters, self._patch))
        model = LiveDdp(self._patch, self._switch, effects, self.compiling, self.experiments)
        digests = facts.parameters_digest.split("+")
        self._runner = TrialRunner(
            model,
            ranks,
            director,
            Stopwatch(device),
            facts.compiles,
            inputs=lambda: self._inputs.texts(digests),
            made=lambda: self._launcher.steps,
            queued=lambda: self.experiments.queued,
        )
        self._runner.begin()


class _CountedGradients(Effect):
    """Counts gradients in trials of a static graph as the launched job does, because that takes time in each step."""

    def __init__(self, used_parameters: UsedParameters, patch: Patch) -> None:
        self._used_parameters, self._patch = used_parameters, patch

    def apply(self, configuration: Configuration) -> None:
        """See `Effect`. It comes after the objects have got the configuration."""
        self._used_parameters.look_again(self._patch.alive())


def _fail(why: str) -> None:
    """End the trial that is being measured, with a reason."""
    raise RuntimeError(f"several steps cannot be one: {why}")


def _fail_with(knob: str, why: str) -> None:
    raise RuntimeError(f"autoddp: {knob} is impossible: {why}")


def _fail_without_gradients(why: str) -> None:
    raise RuntimeError(f"autoddp: {why}")
