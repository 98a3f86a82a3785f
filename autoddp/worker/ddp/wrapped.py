"""One DDP object of the script: what it is like, and how it is given another configuration."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.knobs.computing import OPTIMIZE_DDP
from autoddp.knobs.ddp_arguments import BROADCAST_BUFFERS, BUCKET_CAP_MB, BUCKET_CAP_MB_LIST, OF_BUCKETS, STATIC_GRAPH
from autoddp.knobs.hook import HOOK
from autoddp.worker.ddp import private
from autoddp.worker.ddp.arguments import as_arguments, why_untouchable, without_self
from autoddp.worker.ddp.model import Model, parameters_digest
from autoddp.worker.ddp.private import module_parameters, ranks_of
from autoddp.worker.ddp.rebuild import attributes_made_of, construct_again
from autoddp.worker.hooks import Hook, hook_for
from autoddp.worker.hooks.exact import exact_mean, exact_until

register_by_torch = DDP.register_comm_hook
"""torch's own method, as it was before autoddp's stood in its place."""

Around = Callable[[Hook, dist.ProcessGroup, Model], Hook]
"""Wraps a hook, which reduces the gradients of that model over that group."""
_CAPS = (BUCKET_CAP_MB.name, BUCKET_CAP_MB_LIST.name)
# torch fills its buckets by the layout that parameters had when it made them, and empties them by the present one. So
# what a step computes depends on when buckets are made anew, and on whether gradients lie in them.
_MOVED = (
    "the script gives parameters another memory format after DDP was built, and torch mixes up the values of their "
    "gradients then: call to(memory_format=...) before DistributedDataParallel(...)"
)


def _layout(parameter: nn.Parameter) -> tuple[int, ...]:
    """The strides that matter: a dimension of one element may have any."""
    return tuple(stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True) if size > 1)


class Wrapped:
    """One DDP object of the script: the arguments that the script passed, and methods to give it other ones.

    `takes` says whether configurations are applied to the object; if not, it stays as the script wrote it.
    """

    def __init__(
        self, ddp: DDP, arguments: dict[str, Any], takes: bool = True, name: str = "", model: Model | None = None
    ) -> None:
        self.takes = takes
        self.name = name
        """A name that is the same on all ranks that build this object, and no other object's."""
        self.digest = parameters_digest(ddp.module)
        """Digest of the parameters as they were when the object was built: the script may freeze some later."""
        # This must not keep the script's model alive, nor the process group among the arguments.
        self._ddp = weakref.ref(ddp, lambda _: self._let_go())
        self.arguments = {name: value for name, value in without_self(arguments).items() if name != "module"}
        self._reduced = {id(p): _layout(p) for p in module_parameters(ddp) if p.requires_grad}
        self.model = model or model_of(ddp)
        """The model, one for all objects that the script builds of these parameters, one after another."""
        self.script_hook: Callable[[DDP], None] | None = None
        """Registers the script's own communication hook on the object's reducer; None if the script has none."""
        self.hook_sees_buckets = False
        """Whether the result of that hook may depend on how gradients are put together in buckets."""
        self.is_rebuilt = False
        """Whether DDP's constructor runs again just now, and calls other methods of the object."""
        self._own_hook: Callable[[], Hook | None] = lambda: None
        """A weak reference: the hook holds the process group, which must not outlive the script's model."""
        self._samples = True
        self.experimental: dict[str, Any] = {}
        """Arguments of DDP's constructor that an experiment sets until it ends; none of them is ever launched."""
        self._may_keep_own_buffers = True
        self._present: tuple[Configuration, int | None, Around | None] = (AS_WRITTEN, None, None)

    def _let_go(self) -> None:
        """The script has dropped the object: keep nothing that it was given. A hook's state may be as large as it."""
        self.arguments.clear()
        self.script_hook = None

    @property
    def ddp(self) -> DDP | None:
        """The DDP object; None after the script has dropped it."""
        return self._ddp()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that DDP reduces, in its order: those that required gradients when the object was built."""
        ddp = self.ddp
        return [p for p in module_parameters(ddp) if id(p) in self._reduced] if ddp is not None else []

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that DDP broadcasts before each forward pass; 0 if it does not."""
        ddp = self.ddp
        if ddp is None or not ddp.will_sync_module_buffers():
            return 0
        return sum(buffer.numel() * buffer.element_size() for buffer in ddp.modules_buffers)

    @property
    def reduces_all(self) -> bool:
        """Whether DDP reduces every gradient of the module; False if the script tells it to ignore some parameters."""
        ddp = self.ddp
        return ddp is None or all(id(p) in self._reduced for _, p in ddp.module.named_parameters() if p.requires_grad)

    @property
    def is_compiled(self) -> bool:
        """Whether torch.compile compiles the module, a part of it, or this object: it cuts its graphs by buckets."""
        ddp = self.ddp
        if ddp is None:
            return False
        around = (isinstance(h, dict) and h.get("_orig_mod") is ddp for h in gc.get_referrers(ddp))
        return self.is_compiled_inside or private.is_compiled_itself(ddp) or any(around)

    @property
    def is_compiled_inside(self) -> bool:
        """Whether torch.compile compiles the module, or a part of it, inside the DDP object."""
        return self.ddp is not None and private.compiles_calls(self.ddp.module)

    @property
    def is_sparse(self) -> bool:
        """Whether some gradients are sparse tensors."""
        inside = self.ddp.module.modules() if self.ddp is not None else ()
        return any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse for m in inside)

    def why_untouchable(self) -> str:
        """Why this object must stay as the script wrote it; "" if it may be changed."""
        ddp = self.ddp
        if ddp is None:
            return ""
        if private.uses_python_reducer(ddp):
            return "torch.compile's python_reducer is on"
        if private.finalizes_by_hand(ddp):
            return "the script finalizes its backward passes itself"
        if any(_layout(p) != self._reduced[id(p)] for p in self.parameters):
            return _MOVED
        return why_untouchable(self.arguments, ddp.module)

    def rebuild(self, configuration: Configuration, start_step: int | None, around: Around | None = None) -> None:
        """Run DDP's constructor again on the same object, with `configuration`.

        All ranks must call this between the same two steps. `around` wraps the hook of the configuration, if any. What
        changes the buckets is left out beside a hook of the script whose result may depend on them.
        """
        ddp = self.ddp
        if ddp is None:
            return
        if self.hook_sees_buckets:
            configuration = Configuration({k: v for k, v in configuration.items() if k not in OF_BUCKETS})
        tried = {name: value for name, value in self.experimental.items() if name != BROADCAST_BUFFERS.name}
        arguments = {**self.arguments, **as_arguments(configuration), **tried}
        if arguments.get("device_mesh") is None:
            arguments["process_group"] = ddp.process_group  # the script may have given the object another one
        in_trial, has_final = not self._samples, private.has_final_buckets(ddp)
        theirs = private.hooks_of(ddp) if self.hook_sees_buckets and in_trial and has_final else []
        self.is_rebuilt = True
        try:
            with self._as_it_was_built(ddp):
                construct_again(ddp, arguments)
        finally:
            self.is_rebuilt = False
        self.set_buffers(configuration)
        self.set_cuts(configuration)
        if in_trial:
            self.leave_out_samples()
        if theirs:
            self._present = configuration, start_step, around
            self._register_again(ddp, theirs)
        else:
            self.register_hook(configuration, start_step, around)

    @staticmethod
    def _register_again(ddp: DDP, theirs: list[tuple[Hook, Any]]) -> None:
        """Register the script's hook anew, which is called once DDP has made its buckets for the second time.

        It may keep something for each bucket, as torch's PowerSGD hook does. Those of a new reducer's first pass are
        others than it has known.
        """
        ((hook, state),) = theirs
        this = weakref.ref(ddp)  # what the reducer holds must not hold the object

        def has_final_buckets() -> bool:
            ddp = this()
            return ddp is not None and private.has_final_buckets(ddp)

        register_by_torch(ddp, state, exact_until(has_final_buckets, hook, ddp.process_group))
        private.hooks_of(ddp)[:] = theirs  # a script may save them

    def set_buffers(self, configuration: Configuration) -> None:
        """Switch the broadcast of buffers off if `configuration` or an experiment says so, after the constructor.

        That is not left to the constructor: it would not give all ranks the buffers of rank 0 to begin with, and torch
        2.13 warns of the argument's name.
        """
        ddp = self.ddp
        own = BROADCAST_BUFFERS.name in configuration and self._may_keep_own_buffers
        if ddp is not None and (own or self.experimental.get(BROADCAST_BUFFERS.name) is False):
            ddp.broadcast_buffers = False

    def set_cuts(self, configuration: Configuration) -> None:
        """Let torch.compile cut the model as the script has it, unless `configuration` says how, after the constructor.

        Caps without `optimize_ddp` were measured on a model that was not compiled. torch.compile would make a piece of
        each such bucket, and ends the job where the cap is below 1 MiB. The reducer keeps the caps that it was built
        with.
        """
        ddp = self.ddp
        if ddp is None or OPTIMIZE_DDP.name in configuration or configuration.keys().isdisjoint(_CAPS):
            return
        theirs = {name: self.arguments[name] for name in _CAPS if name in self.arguments}
        made = attributes_made_of({**theirs, "process_group": ddp.process_group}, ddp)
        ddp.bucket_bytes_cap = made["bucket_bytes_cap"]

    @property
    def keeps_own_buffers(self) -> bool:
        """Whether DDP broadcasts no buffers because of the configuration."""
        return self._may_keep_own_buffers and BROADCAST_BUFFERS.name in self._present[0]

    def broadcast_buffers(self) -> None:
        """Broadcast the buffers as the script has it from this forward pass on, whatever the configuration says.

        All ranks must call this before the same pass, and then take part in its broadcast. DDP leaves that out after a
        pass without gradients, which one rank alone may have run.
        """
        ddp = self.ddp
        if ddp is not None and self.keeps_own_buffers:
            self._may_keep_own_buffers = False
            ddp.broadcast_buffers = self._script_broadcasts
            ddp.require_forward_param_sync = True

    @property
    def _script_broadcasts(self) -> bool:
        given = self.arguments.get("forward_sync_buffers")  # since torch 2.13
        if given is None:
            given = self.arguments.get(BROADCAST_BUFFERS.name)
        return given is None or bool(given)

    def register_hook(self, configuration: Configuration, start_step: int | None, around: Around | None) -> None:
        """Register the script's hook, else that of `configuration`, on a reducer that has none yet."""
        ddp = self.ddp
        assert ddp is not None
        self._present = configuration, start_step, around
        if self.script_hook is not None:
            self.script_hook(ddp)
            return
        # No hook of ours takes the bucket of a sparse gradient. Of one rank among others nothing travels.
        is_left_out = self.is_sparse or ddp.process_group.size() == 1 < _ranks_of_job(ddp)
        found = None if is_left_out else hook_for(configuration, ddp.process_group, start_step, self.model)
        if found is not None:
            state, hook = found
            self._register_own(ddp, state, around(hook, ddp.process_group, self.model) if around else hook)

    def leave_out_hook(self) -> bool:
        """Reduce without the hook of the configuration from the next pass on; whether there was one.

        All ranks must call this between the same two steps.
        """
        configuration, start_step, around = self._present
        if self.script_hook is not None or HOOK.name not in configuration:
            return False
        self.rebuild(configuration.without({HOOK.name}), start_step, around)
        return True

    def leave_out_static_graph(self) -> bool:
        """Reduce without the static graph of the configuration from the pass that begins on; whether there was one.

        All ranks must call this before the same pass. A static graph of the script's own stays.
        """
        configuration, start_step, around = self._present
        if not STATIC_GRAPH.of(configuration):
            return False
        self.rebuild(configuration.without({STATIC_GRAPH.name}), start_step, around)
        return True

    def register_exact_hook(self, around: Callable[[Hook, dist.ProcessGroup], Hook]) -> bool:
        """Register `around` DDP's own mean, on a reducer without a hook; False, and nothing is done, if it has one.

        The reducer and its buckets stay. A reducer never loses its hook: `rebuild_as_it_is` makes one without it.
        """
        ddp = self.ddp
        if ddp is None or private.has_hook(ddp):
            return False
        self._register_own(ddp, ddp.process_group, around(exact_mean, ddp.process_group))
        return True

    def _register_own(self, ddp: DDP, state: Any, hook: Hook) -> None:
        self._own_hook = weakref.ref(hook)
        register_by_torch(ddp, state, hook)

    def has_own(self, hook: Hook | None) -> bool:
        """Whether this is the hook that was registered last for the configuration."""
        return hook is not None and self._own_hook() is hook

    def leave_out_samples(self) -> None:
        """Keep DDP's logger from reading the times of passes from now on.

        The logger does so in the first ten passes of each reducer, and on CUDA it waits for the device. A trial that
        has just begun would be timed with these waits.
        """
        self._samples, ddp = False, self.ddp
        if ddp is not None and ddp.logger is not None and not isinstance(ddp.logger, _LoggerWithoutSamples):
            ddp.logger = cast("Any", _LoggerWithoutSamples(ddp.logger))

    @property
    def has_static_graph_of_ours(self) -> bool:
        """Whether the configuration gives the object a static graph."""
        return bool(STATIC_GRAPH.of(self._present[0]))

    @property
    def has_buckets_of_ours(self) -> bool:
        """Whether the configuration changes the buckets, and the script has a hook that may depend on them."""
        return self.hook_sees_buckets and not self._present[0].keys().isdisjoint(OF_BUCKETS)

    @property
    def is_changed(self) -> bool:
        """Whether a configuration was applied to the object."""
        return bool(self._present[0])

    def as_pickled(self, state: dict[str, Any]) -> dict[str, Any]:
        """`state`, which DDP gives to pickle and to copy, as it would be without autoddp.

        Our hooks hold process groups and functions that cannot be pickled. And whoever loads a script's file must get
        the script's own arguments: an object that was unpickled or copied is not known here, so nothing watches it.
        """
        own = self._own_hook()
        state = {**state, "_comm_hooks": [one for one in state["_comm_hooks"] if one[0] is not own]}
        ddp = self.ddp
        if ddp is None or not (self.is_changed or self.experimental):
            return state
        made = attributes_made_of(self.arguments, ddp)
        if not made["static_graph"]:
            state.pop(private.FIRST_OF_STATIC, None)
        state.update((name, made[name]) for name in private.OF_ARGUMENTS if name in made)
        state.update((name, self._script_broadcasts) for name in private.BROADCASTS if name in state)
        return state

    def rebuild_as_it_is(self) -> None:
        """Run DDP's constructor again with the present arguments."""
        self.rebuild(*self._present)

    def forget_what_was_used(self) -> None:
        """Make the reducer forget backward passes that did not reduce and are never to be reduced.

        With find_unused_parameters a reducer has noted the parameters that these passes used, and would wait for their
        gradients. The object is rebuilt in that case.
        """
        if self.ddp is not None and self.ddp.find_unused_parameters:
            self.rebuild_as_it_is()

    def broadcast_state(self) -> None:
        """Copy the parameters of rank 0 to all ranks, which differ after steps without reduction.

        DDP's own function does it, so each rank keeps what DDP does not synchronise: parameters and buffers that the
        script told it to ignore, and all buffers if `broadcast_buffers` is off.
        """
        ddp = self.ddp
        if ddp is not None:
            private.copy_state_of_rank_0(ddp)

    @contextlib.contextmanager
    def _as_it_was_built(self, ddp: DDP) -> Iterator[None]:
        """Restore `requires_grad` as it was when the object was built, because DDP's constructor goes by it.

        Parameters that the script has added to the module since are not reduced, so they do not ask for it either.
        """
        of_module = (p for _, p in ddp.module.named_parameters())
        now = [(p, p.requires_grad) for p in dict.fromkeys((*module_parameters(ddp), *of_module))]
        for p, asks in now:
            if asks != (id(p) in self._reduced):
                p.requires_grad_(not asks)
        try:
            yield
        finally:
            for p, asks in now:
                if p.requires_grad != asks:
                    p.requires_grad_(asks)


def model_of(ddp: DDP) -> Model:
    """The model of an object that was just built."""
    reduced = {id(p): p for p in module_parameters(ddp) if p.requires_grad}
    names = {id(p): name for name, p in ddp.module.named_parameters()}
    return Model({names.get(place, str(place)): p for place, p in reduced.items()}, ranks_of(ddp))


def why_another_world(ddp: DDP, started: int) -> str:
    """Why the script's ranks are not the `started` ones of the launchers; "" if they are, or `started` is 0: not known.

    A script may start ranks itself, or say itself which ones there are.
    """
    ranks = _ranks_of_job(ddp)
    if started in (0, ranks):
        return ""
    return f"the script trains with {ranks} ranks, and autoddp has started {started}"


def _ranks_of_job(ddp: DDP) -> int:
    """The number of ranks of the default process group, or of the object's own group if that has more."""
    return max(dist.get_world_size() if dist.is_initialized() else 0, ddp.process_group.size())


class _LoggerWithoutSamples:
    """DDP's logger with the one method disabled that DDP calls in each forward pass."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def set_runtime_stats_and_log(self) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)
