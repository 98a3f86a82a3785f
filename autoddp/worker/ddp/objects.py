"""Changes DistributedDataParallel objects. This is the only file that uses private names of the class.

The class is patched in place, so the patch reaches every name that a script has for it, and every subclass.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import inspect
import sys
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.hooks import RemovableHandle, unserializable_hook

from autoddp.knobs import AS_WRITTEN, KNOBS, Configuration, Reach
from autoddp.knobs.ddp_arguments import (
    BROADCAST_BUFFERS,
    BUCKET_CAP_MB,
    BUCKET_CAP_MB_LIST,
    FIND_UNUSED,
    GRADIENT_AS_BUCKET_VIEW,
    OF_BUCKETS,
    STATIC_GRAPH,
)
from autoddp.worker.ddp.model import Model
from autoddp.worker.hooks import Hook, hook_for
from autoddp.worker.hooks.exact import exact_mean
from autoddp.worker.process.device import is_capturing
from autoddp.worker.process.rank_store import RankStore

_construct = DDP.__init__
_register = DDP.register_comm_hook
_register_builtin = DDP._register_builtin_comm_hook
_set_static_graph: Callable[[DDP], None] = DDP._set_static_graph
_pickled = cast("Callable[[DDP], dict[str, Any]]", DDP.__getstate__)
_unpickle = cast("Callable[[DDP, dict[str, Any]], None]", DDP.__setstate__)
_signature = inspect.signature(DDP.__init__)

UNPICKLED = "the script trains a DDP object that it has unpickled or copied"
"""See `DdpEvents.unknown_trains`."""

CAPTURES = "the script captures passes of DDP in a CUDA graph of its own"
"""See `DdpEvents.script_captures`."""

Around = Callable[[Hook, dist.ProcessGroup, Model], Hook]
"""Wraps a hook, which reduces the gradients of that model over that group."""


def _tells_who_holds_gradients() -> bool:
    """Whether torch's own hold on a `.grad` counts among the references of Python's object.

    In torch 2.6 it counts only at times, so `views` cannot see there whether the script holds a gradient.
    """
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    gradients = [parameter.grad]
    in_use = sys.getrefcount(gradients[0])
    parameter.grad = None
    return in_use > sys.getrefcount(gradients[0])


AVAILABLE_ARGUMENTS = frozenset(knob.name for knob in KNOBS if knob.reach is Reach.DDP) & set(_signature.parameters)
if not _tells_who_holds_gradients():
    AVAILABLE_ARGUMENTS -= {GRADIENT_AS_BUCKET_VIEW.name}
"""The arguments of DDP's constructor that are knobs, in the installed torch."""


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
        self._ddp = weakref.ref(ddp, lambda _: self.arguments.clear())
        self.arguments = {name: value for name, value in _plain(arguments).items() if name != "module"}
        self._reduced = {id(p) for p in ddp._module_parameters if p.requires_grad}
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

    @property
    def ddp(self) -> DDP | None:
        """The DDP object; None after the script has dropped it."""
        return self._ddp()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that DDP reduces, in its order: those that required gradients when the object was built."""
        ddp = self.ddp
        return [p for p in ddp._module_parameters if id(p) in self._reduced] if ddp is not None else []

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
        return ddp is None or all(id(p) in self._reduced for p in ddp.module.parameters() if p.requires_grad)

    @property
    def is_compiled(self) -> bool:
        """Whether torch.compile compiles the module, a part of it, or this object: it cuts its graphs by buckets."""
        ddp = self.ddp
        if ddp is None:
            return False
        around = (isinstance(h, dict) and h.get("_orig_mod") is ddp for h in gc.get_referrers(ddp))
        return self.is_compiled_inside or bool(ddp._compiled_call_impl) or any(around)

    @property
    def is_compiled_inside(self) -> bool:
        """Whether torch.compile compiles the module, or a part of it, inside the DDP object."""
        inside = self.ddp.module.modules() if self.ddp is not None else ()
        return any(isinstance(m, torch._dynamo.OptimizedModule) or m._compiled_call_impl for m in inside)

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
        if getattr(ddp, "_use_python_reducer", False):
            return "torch.compile's python_reducer is on"
        return _why_untouchable(self.arguments, ddp.module)

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
        arguments = {**self.arguments, **_as_arguments(configuration), **tried}
        if arguments.get("device_mesh") is None:
            arguments["process_group"] = ddp.process_group  # the script may have given the object another one
        self.is_rebuilt = True
        try:
            with self._as_it_was_built(ddp):
                _construct_again(ddp, arguments)
        finally:
            self.is_rebuilt = False
        self.set_buffers(configuration)
        if not self._samples:
            self.leave_out_samples()
        self.register_hook(configuration, start_step, around)

    def set_buffers(self, configuration: Configuration) -> None:
        """Switch the broadcast of buffers off if `configuration` or an experiment says so, after the constructor.

        That is not left to the constructor: it would not give all ranks the buffers of rank 0 to begin with, and torch
        2.13 warns of the argument's name.
        """
        ddp = self.ddp
        own = BROADCAST_BUFFERS.name in configuration and self._may_keep_own_buffers
        if ddp is not None and (own or self.experimental.get(BROADCAST_BUFFERS.name) is False):
            ddp.broadcast_buffers = False

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
        # No hook of ours takes the bucket of a sparse gradient.
        found = None if self.is_sparse else hook_for(configuration, ddp.process_group, start_step, self.model)
        if found is not None:
            state, hook = found
            self._register_own(ddp, state, around(hook, ddp.process_group, self.model) if around else hook)

    def register_exact_hook(self, around: Callable[[Hook, dist.ProcessGroup], Hook]) -> bool:
        """Register `around` DDP's own mean, on a reducer without a hook; False, and nothing is done, if it has one.

        The reducer and its buckets stay. A reducer never loses its hook: `rebuild_as_it_is` makes one without it.
        """
        ddp = self.ddp
        if ddp is None or ddp._comm_hooks:
            return False
        self._register_own(ddp, ddp.process_group, around(exact_mean, ddp.process_group))
        return True

    def _register_own(self, ddp: DDP, state: Any, hook: Hook) -> None:
        self._own_hook = weakref.ref(hook)
        _register(ddp, state, hook)

    def leave_out_samples(self) -> None:
        """Keep DDP's logger from reading the times of passes from now on.

        The logger does so in the first ten passes of each reducer, and on CUDA it waits for the device. A trial that
        has just begun would be timed with these waits.
        """
        self._samples, ddp = False, self.ddp
        if ddp is not None and ddp.logger is not None and not isinstance(ddp.logger, _LoggerWithoutSamples):
            ddp.logger = cast("Any", _LoggerWithoutSamples(ddp.logger))

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
        made = _made_of(self.arguments, ddp)
        if not made["static_graph"]:
            state.pop(_FIRST_OF_STATIC, None)
        state.update((name, made[name]) for name in _OF_ARGUMENTS if name in made)
        state.update((name, self._script_broadcasts) for name in _BROADCASTS if name in state)
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
            size, ignored = ddp.broadcast_bucket_size, ddp.parameters_to_ignore
            sync = dist.utils._sync_module_states
            sync(ddp.module, ddp.process_group, size, 0, ignored, broadcast_buffers=ddp.broadcast_buffers)

    @contextlib.contextmanager
    def _as_it_was_built(self, ddp: DDP) -> Iterator[None]:
        """Restore `requires_grad` as it was when the object was built, because DDP's constructor goes by it.

        Parameters that the script has added to the module since are not reduced, so they do not ask for it either.
        """
        now = [(p, p.requires_grad) for p in dict.fromkeys((*ddp._module_parameters, *ddp.module.parameters()))]
        for p, asks in now:
            if asks != (id(p) in self._reduced):
                p.requires_grad_(not asks)
        try:
            yield
        finally:
            for p, asks in now:
                if p.requires_grad != asks:
                    p.requires_grad_(asks)


def _why_untouchable(arguments: dict[str, Any], module: nn.Module) -> str:
    """Why an object must not be changed: in these cases DDP uses a hook of its own or depends on other arguments."""
    if arguments.get("mixed_precision") is not None:
        return "DDP's own mixed_precision is on"
    if arguments.get("delay_all_reduce_named_params") is not None:
        return "delay_all_reduce_named_params is used"
    mesh = arguments.get("device_mesh")
    if mesh is not None and _root_of(mesh) != mesh:
        return "its device_mesh is part of a larger one: the rest of it may split the parameters"
    if any(hasattr(p, "_in_backward_optimizers") for p in module.parameters()):
        return "the optimizer runs inside backward"
    return ""


def _root_of(mesh: Any) -> Any:
    """The mesh from which `mesh` was cut, or `mesh` itself; found in the same way as in DDP's constructor."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    return dist.device_mesh._mesh_resources.get_root_mesh(mesh)  # torch before 2.9


def _as_arguments(configuration: Configuration) -> dict[str, Any]:
    given = {name: value for name, value in configuration.ddp_arguments.items() if name != BROADCAST_BUFFERS.name}
    if STATIC_GRAPH.of(configuration):
        # A static graph ends the search for unused parameters; DDP would warn, and join() still take part in a search.
        given[FIND_UNUSED] = False
    plan, by_list = BUCKET_CAP_MB_LIST.of(configuration), BUCKET_CAP_MB_LIST.name
    if plan:
        return given | {by_list: list(plan)}
    # DDP would prefer a list that the script wrote to our cap.
    return given | ({by_list: None} if BUCKET_CAP_MB.name in given and by_list in AVAILABLE_ARGUMENTS else {})


_OF_ARGUMENTS = (
    "static_graph",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "batched_grad_copy",
    "bucket_bytes_cap",
    "bucket_bytes_cap_list",
    "bucket_bytes_cap_default",
    "_bucket_config",
)
"""Attributes that DDP's constructor makes of arguments that are knobs; older versions of torch have fewer."""
_BROADCASTS = ("broadcast_buffers", "forward_sync_buffers")
"""Attributes that DDP's constructor makes of `broadcast_buffers`, which has two names since torch 2.13."""


def _made_of(arguments: dict[str, Any], like: DDP) -> dict[str, Any]:
    """The attributes of an object with these arguments; it has one parameter, on the device of `like`.

    Only DDP's constructor knows them for each version of torch. Without its first synchronisation it sends nothing, so
    one rank alone may call it.
    """
    module, made = nn.Module(), DDP.__new__(DDP)
    module.register_parameter("only", nn.Parameter(torch.zeros(1, device=next(iter(like._module_parameters)).device)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _construct_alone(made, module, arguments)
    return dict(made.__dict__)


class _LoggerWithoutSamples:
    """DDP's logger with the one method disabled that DDP calls in each forward pass."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def set_runtime_stats_and_log(self) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)


_MODULE_STATE = frozenset(nn.Module().__dict__)
_CARRIED_OVER = _MODULE_STATE | {
    "require_backward_grad_sync",
    "require_forward_param_sync",
    "_join_config",
    "_ddp_sink_clone",
    # An object without buffers never broadcasts those that the script has added to the module since.
    "modules_buffers",
    "named_module_buffers",
}


_FIRST_OF_STATIC = "_static_graph_delay_allreduce_enqueued"
_OF_THE_OLD_REDUCER = ("reducer", "logger", _FIRST_OF_STATIC)
"""Attributes to delete before DDP's constructor runs again. The first two keep the old reducer alive, whose destructor
removes its autograd hooks from the parameters. The third is set only for a static graph, and would stay afterwards."""


_FIRST_SYNC = ("_verify_param_shape_across_processes", "_sync_module_states")
"""Functions that DDP's constructor calls to compare the parameters of all ranks and to copy those of rank 0."""


def _construct_alone(ddp: DDP, module: nn.Module, arguments: dict[str, Any]) -> None:
    """Run DDP's constructor without its first synchronisation, so that nothing is sent."""
    if "init_sync" in _signature.parameters:
        return _construct(ddp, module, **{**arguments, "init_sync": False})
    of_torch = vars(torch.nn.parallel.distributed)  # torch 2.6 has no such argument
    before = {name: of_torch[name] for name in _FIRST_SYNC}
    of_torch.update(dict.fromkeys(before, lambda *_, **__: None))
    try:
        _construct(ddp, module, **arguments)
    finally:
        of_torch.update(before)


def _construct_again(ddp: DDP, arguments: dict[str, Any]) -> None:
    before = dict(ddp.__dict__)
    module = ddp.module
    for name in _OF_THE_OLD_REDUCER:
        before.pop(name, None)
        ddp.__dict__.pop(name, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the constructor's warnings were printed when the script called it
        with _gradients_stay(module):
            _construct_alone(ddp, module, arguments)
    for name, value in before.items():
        if name in _CARRIED_OVER or name not in ddp.__dict__:
            ddp.__dict__[name] = value


@contextlib.contextmanager
def _gradients_stay(module: nn.Module) -> Iterator[None]:
    """Keep DDP's constructor from replacing gradients by parts of its buckets: the script may hold them."""
    gradients = [(p, p.grad) for p in module.parameters()]
    for p, _ in gradients:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient


class DdpEvents:
    """Handles what happens to the script's DDP objects, in the order of a training step.

    The methods do nothing here; subclasses override those that they need.
    """

    def takes(self, module: nn.Module) -> bool:
        """Whether the object that is about to be built around `module` is built with `Patch.configuration`.

        If not, it is built as the script wrote it.
        """
        return True

    def built(self, wrapped: Wrapped) -> None:
        """An object has been built."""

    def script_registered(self, wrapped: Wrapped) -> None:
        """The script has registered a communication hook of its own."""

    def unknown_trains(self) -> None:
        """An object that its constructor has not built, but pickle or `copy`, begins a forward pass of training.

        It stays as the script has it, and there are no other events of it.
        """

    def script_captures(self, ddp: DDP) -> None:
        """A forward pass begins that the script captures in a CUDA graph. There are no other events of this pass.

        Later the graph repeats what DDP does in it, with no Python. Whoever waits for the device now spoils the graph.
        """

    def forward_begins(self, ddp: DDP) -> None:
        """A forward pass begins; DDP has not yet prepared it."""

    def called(self, ddp: DDP, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The module is about to be called with these arguments."""

    def returned(self, ddp: DDP, what: Any) -> Any:
        """The module has returned `what`; the script gets the return value of this method."""
        return what


class Patch:
    """Patches DDP: reports what happens to the script's objects to `events`, and builds them with `configuration`."""

    def __init__(self) -> None:
        self.events = DdpEvents()
        """The handler of all events; another one may be set at any time."""
        self.wrapped: list[Wrapped] = []
        self.configuration = AS_WRITTEN
        """The configuration of objects that are built from now on."""
        self.start_step: int | None = None
        """Reductions before PowerSGD begins; None for the number in the configuration."""
        self.around: Around | None = None
        """Wraps each hook of a configuration."""
        self.samples = True
        """Whether DDP's logger reads the times of some passes; see `Wrapped.leave_out_samples`."""
        self._constructing = 0
        self._watches = False
        self._built: dict[str, int] = {}
        """Process group → the number of objects that were built on it."""
        self._models: list[Model] = []
        """Models whose parameters still exist."""

    def only_what_all_have(self, ranks: RankStore) -> object:
        """Leave out the objects that some rank has freed already. The others stay at least as long as the result.

        What the script has dropped is freed at another moment on each rank. All ranks call this at the same boundary.
        """
        held = {wrapped.name: wrapped.ddp for wrapped in self.alive()}
        built = (_name(group, number) for group, count in self._built.items() for number in range(count))
        freed = [name for name in built if name not in held]
        of_all = ranks.gather([freed])
        left_out = set(ranks.share(sorted({name for (names,) in of_all for name in names})))
        self.wrapped = [wrapped for wrapped in self.alive() if wrapped.name not in left_out]
        return held

    def _name_of(self, ddp: DDP) -> str:
        group = f"{zlib.crc32(repr(dist.get_process_group_ranks(ddp.process_group)).encode()):08x}"
        number = self._built.get(group, 0)
        self._built[group] = number + 1
        return _name(group, number)

    def _model_of(self, ddp: DDP) -> Model:
        """The model that this new object has in common with earlier ones, or a new one."""
        self._models = [model for model in self._models if model.is_there]
        new = model_of(ddp)
        parameters = [p for p in ddp._module_parameters if p.requires_grad]
        same = (one for one in self._models if one.description == new.description and one.has(parameters))
        found = next(same, new)
        if found is new:
            self._models.append(new)
        return found

    def alive(self) -> list[Wrapped]:
        """The DDP objects that the script still holds, in order of construction."""
        self.wrapped = [wrapped for wrapped in self.wrapped if wrapped.ddp is not None]
        return self.wrapped

    def of(self, ddp: DDP) -> Wrapped | None:
        """The `Wrapped` of that object; None if it was built before `install`, or unpickled, or copied."""
        return next((wrapped for wrapped in self.wrapped if wrapped.ddp is ddp), None)

    def install(self) -> None:
        """Patch the class in place."""
        DDP.__init__ = self._wrap_construction()  # type: ignore[method-assign]
        DDP.register_comm_hook = self._wrap_registration(_register)  # type: ignore[method-assign]
        DDP._register_builtin_comm_hook = self._wrap_registration(_register_builtin)  # type: ignore[method-assign]
        DDP._set_static_graph = self._wrap_static_graph()  # type: ignore[method-assign]
        DDP.__getstate__ = self._wrap_pickling()  # type: ignore[method-assign]
        DDP.__setstate__ = self._wrap_unpickling()  # type: ignore[method-assign]

    def _watch_forward(self) -> None:
        """Patch the forward pass. This waits for the first object, because importing torch._dynamo takes a second."""
        if self._watches:
            return
        self._watches = True
        DDP._pre_forward = self._wrap_forward()  # type: ignore[method-assign]
        DDP._post_forward = self._wrap_return()  # type: ignore[method-assign]

    def _wrap_construction(self) -> Callable[..., None]:
        @functools.wraps(_construct)
        def construct(ddp: DDP, *args: Any, **kwargs: Any) -> None:
            given = _bind(ddp, args, kwargs)
            if given is None:  # not a valid call: let torch raise its own error
                return _construct(ddp, *args, **kwargs)
            takes = not _why_untouchable(given, given["module"]) and self.events.takes(given["module"])
            configuration = self.configuration if takes else AS_WRITTEN
            self._watch_forward()
            # If the script sets the argument itself, its gradients go where torch puts them.
            is_ours = bool(GRADIENT_AS_BUCKET_VIEW.of(configuration)) and not given.get(GRADIENT_AS_BUCKET_VIEW.name)
            stay = _gradients_stay(given["module"]) if is_ours else contextlib.nullcontext()
            with self._inside_construction(), stay:
                _construct(ddp, **{**_plain(given), **_as_arguments(configuration)})
            wrapped = Wrapped(ddp, given, takes, self._name_of(ddp), self._model_of(ddp))
            wrapped.set_buffers(configuration)
            if not self.samples:
                wrapped.leave_out_samples()
            self.wrapped.append(wrapped)
            wrapped.register_hook(configuration, self.start_step, self.around)
            self.events.built(wrapped)

        return construct

    def _wrap_registration(self, register: Callable[..., None]) -> Callable[..., None]:
        """`register` is a method by which a script registers a hook, in Python or built into torch."""

        @functools.wraps(register)
        def registered(ddp: DDP, *args: Any, **kwargs: Any) -> None:
            wrapped = self.of(ddp)
            if wrapped is None or self._constructing:
                return register(ddp, *args, **kwargs)

            def again(ddp: DDP) -> None:
                register(ddp, *args, **kwargs)

            wrapped.hook_sees_buckets = register is _register and _sees_buckets((*args, *kwargs.values()))
            has_ours = bool(getattr(ddp, "_comm_hooks", None)) or wrapped.has_buckets_of_ours
            if has_ours and wrapped.script_hook is None:
                # The reducer has a hook of ours, and takes only one, or the buckets are ours: build a new reducer.
                wrapped.script_hook = again
                wrapped.rebuild_as_it_is()
            else:
                again(ddp)
                wrapped.script_hook = again
            self.events.script_registered(wrapped)

        return registered

    def _wrap_static_graph(self) -> Callable[[DDP], None]:
        """A script may set a static graph after construction. It is then as if it had passed the argument."""

        @functools.wraps(_set_static_graph)
        def set_static_graph(ddp: DDP) -> None:
            _set_static_graph(ddp)
            wrapped = self.of(ddp)
            if wrapped is not None and not self._constructing and not wrapped.is_rebuilt:
                wrapped.arguments[STATIC_GRAPH.name] = True

        return set_static_graph

    def _wrap_pickling(self) -> Callable[[DDP], dict[str, Any]]:
        @functools.wraps(_pickled)
        def getstate(ddp: DDP) -> dict[str, Any]:
            wrapped, state = self.of(ddp), _pickled(ddp)
            return state if wrapped is None else wrapped.as_pickled(state)

        return getstate

    def _wrap_unpickling(self) -> Callable[[DDP, dict[str, Any]], None]:
        @functools.wraps(_unpickle)
        def setstate(ddp: DDP, state: dict[str, Any]) -> None:
            self._watch_forward()
            _unpickle(ddp, state)

        return setstate

    def _wrap_forward(self) -> Callable[..., Any]:
        before = cast("Callable[..., Any]", DDP._pre_forward)

        @functools.wraps(before)
        def _pre_forward(ddp: DDP, *inputs: Any, **kwargs: Any) -> Any:
            if self.of(ddp) is None:
                if _trains(ddp):
                    self.events.unknown_trains()
                return before(ddp, *inputs, **kwargs)
            if is_capturing(_device_of(ddp)):
                self.events.script_captures(ddp)
                return before(ddp, *inputs, **kwargs)
            self.events.forward_begins(ddp)
            inputs, kwargs = before(ddp, *inputs, **kwargs)
            self.events.called(ddp, inputs, kwargs)
            return inputs, kwargs

        return _skipped_by_dynamo(_pre_forward)

    def _wrap_return(self) -> Callable[..., Any]:
        after = cast("Callable[..., Any]", DDP._post_forward)

        @functools.wraps(after)
        def _post_forward(ddp: DDP, output: Any) -> Any:
            has_events = self.of(ddp) is not None and not is_capturing(_device_of(ddp))
            return after(ddp, self.events.returned(ddp, output) if has_events else output)

        return _skipped_by_dynamo(_post_forward)

    @contextlib.contextmanager
    def _inside_construction(self) -> Iterator[None]:
        self._constructing += 1
        try:
            yield
        finally:
            self._constructing -= 1


def model_of(ddp: DDP) -> Model:
    """The model of an object that was just built."""
    reduced = {id(p): p for p in ddp._module_parameters if p.requires_grad}
    names = {id(p): name for name, p in ddp.module.named_parameters()}
    ranks = dist.get_process_group_ranks(ddp.process_group)
    return Model({names.get(place, str(place)): p for place, p in reduced.items()}, ranks)


def _name(group: str, number: int) -> str:
    """The name of the `number`th object on its group."""
    return f"{group}/{number}"


def _device_of(ddp: DDP) -> torch.device:
    """The device of all its parameters, or of the first of them."""
    device: torch.device = next(iter(ddp._module_parameters)).device
    return device


def _trains(ddp: DDP) -> bool:
    """Whether the object's forward pass, which begins now, may have a backward pass that changes parameters."""
    return ddp.training and torch.is_grad_enabled() and any(p.requires_grad for p in ddp.module.parameters())


def around_ddps_own(around: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Enter `around()` whenever DDP itself reads an object's attributes: before and after the module's forward."""

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with around():
                return function(*args, **kwargs)

        return _skipped_by_dynamo(inside)

    DDP._pre_forward = wrapped(DDP._pre_forward)  # type: ignore[method-assign]
    DDP._post_forward = wrapped(DDP._post_forward)  # type: ignore[method-assign]


def why_another_world(ddp: DDP, started: int) -> str:
    """Why the script's ranks are not the `started` ones of the launchers; "" if they are, or `started` is 0: not known.

    A script may start ranks itself, or say itself which ones there are. Its ranks are those of the default process
    group, or of the object's own group if that has more.
    """
    ranks = max(dist.get_world_size() if dist.is_initialized() else 0, ddp.process_group.size())
    if started in (0, ranks):
        return ""
    return f"the script trains with {ranks} ranks, and autoddp has started {started}"


def is_joining(ddp: DDP) -> bool:
    """Whether the script uses `ddp` inside `join()`: then some ranks may have ended and only shadow its reductions."""
    return bool(ddp._join_config.enable)


def has_buffer_hook(ddp: DDP) -> bool:
    """Whether the script has registered a hook that DDP calls in place of its broadcast of buffers."""
    return hasattr(ddp, "buffer_hook")


def watch_uneven_inputs(found: Callable[[], None]) -> None:
    """Call `found` in a rank that is at the end of its inputs inside `join()` while other ranks have more.

    From then on this rank has no steps; it only shadows the collectives of the others until they have ended.
    """
    join_hook: Callable[..., Any] = DDP.join_hook

    @functools.wraps(join_hook)
    def watched(ddp: DDP, **kwargs: Any) -> Any:
        hook = join_hook(ddp, **kwargs)
        shadow = hook.main_hook  # torch calls it once for each step that the other ranks still make

        def main_hook() -> None:
            found()
            shadow()

        hook.main_hook = main_hook
        return hook

    DDP.join_hook = watched  # type: ignore[method-assign, assignment]


def must_reduce(ddp: DDP) -> bool:
    """Whether the next backward pass must reduce: with a static graph, DDP learns the order in the first one."""
    return bool(ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued)


def store_of(ddp: DDP) -> Any:
    """The store of the object's process group; None if torch does not give it."""
    try:
        return dist.distributed_c10d._get_process_group_store(ddp.process_group)
    except (AttributeError, KeyError):
        return None


def backend_of(ddp: DDP) -> str:
    """The backend that reduces the object's gradients: "nccl", "gloo", and so on.

    A group may have one backend for each type of device, as after `init_process_group()` without a backend. There
    `get_backend` returns none of these names but "undefined", or "cpu:gloo,cuda:nccl" as the script has written it.
    """
    by_device = dict(part.split(":") for part in dist.get_backend_config(ddp.process_group).split(",") if ":" in part)
    return by_device.get(_device_of(ddp).type, dist.get_backend(ddp.process_group))


def tensors_in(output: Any) -> list[torch.Tensor]:
    """All tensors in the output of a module, as far as DDP itself finds them."""
    return list(torch.nn.parallel.distributed._find_tensors(output))


def tensors_of_static_graph(output: Any) -> list[torch.Tensor]:
    """The tensors in the output of a module from which DDP learns a static graph.

    These are others than those of `tensors_in`: torch's pytrees do not see into dataclasses, nor into classes that a
    script has derived from dict, list or tuple.
    """
    leaves = torch.nn.parallel.distributed._tree_flatten_with_rref(output)[0]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def when_backward_begins(
    output: Any, call: Callable[[], object], tensors: Callable[[Any], list[torch.Tensor]] = tensors_in
) -> bool:
    """Call `call` at each gradient of a tensor in `output`, which a module has returned; `tensors` finds them.

    Returns whether there is such a tensor. A script may save it: without the mark torch would warn that this hook is
    not saved with it.
    """

    def begins(_gradient: torch.Tensor) -> None:
        call()

    unserializable_hook(begins)
    found = [tensor for tensor in tensors(output) if tensor.requires_grad]
    for tensor in found:
        tensor.register_hook(begins)
    return bool(found)


def when_gradients_come(parameters: Iterable[torch.Tensor], call: Callable[[], object]) -> list[RemovableHandle]:
    """Call `call` at the gradient of each of these parameters, until the handles are removed."""

    def comes(_gradient: torch.Tensor) -> None:
        call()

    unserializable_hook(comes)
    return [parameter.register_hook(comes) for parameter in parameters if parameter.requires_grad]


def version_of(tensor: torch.Tensor) -> int:
    """How often `tensor` was written to in place. torch has no public name for it."""
    return int(tensor._version)


def has_final_buckets(ddp: DDP) -> bool:
    """Whether DDP has made its buckets for the second time. It does that once, before a forward pass, or never."""
    return bool(getattr(ddp, "_has_rebuilt_buckets", False))


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor of which `tensor` is a part or another shape, as a gradient is of its bucket; None for any other.

    torch has no public name for it.
    """
    return tensor._base


def uses_of(storage: torch.UntypedStorage) -> int:
    """How many tensors and objects of Python hold this storage: `storage` itself is one. torch has no other name."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def after_backward_computed(call: Callable[[], None]) -> None:
    """Call `call` when the current backward pass has computed all gradients; DDP waits for its reductions after that.

    It must be called before the last gradient is ready, because DDP queues its waiting then.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


def after_this_backward(call: Callable[[], None]) -> None:
    """Call `call` when the current backward pass has ended, and with it DDP's reduction."""
    engine = torch.autograd.Variable._execution_engine

    def then() -> None:
        engine.queue_callback(call)  # runs after the callbacks that DDP has queued until then

    engine.queue_callback(then)


def _skipped_by_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, skipped by Dynamo: Dynamo skips DDP's file, and must also skip our wrappers of its methods.

    `functools.wraps` copies what an earlier wrapper of the method has, also the attribute by which torch 2.7 and 2.8
    find the function to skip: they would give back that wrapper's, and leave this one out.
    """
    vars(function).pop("_torchdynamo_orig_callable", None)
    disable = cast("Callable[..., Any]", torch.compiler.disable)
    return cast("Callable[..., Any]", disable(function, recursive=False))


def inside_forward(ddp: DDP) -> contextlib.AbstractContextManager[None]:
    """A context as inside the object's forward pass: torch.compile cuts graphs in it at this object's buckets."""
    inside: contextlib.AbstractContextManager[None] = ddp._inside_ddp_forward()
    return inside


def _sees_buckets(given: tuple[Any, ...]) -> bool:
    """Whether these are the arguments of a hook whose result may depend on how gradients are put together in buckets.

    A few hooks of torch are known to give each element of a gradient the same value in whatever bucket it lies.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # most jobs register none

    by_element = default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook
    return not any(one is hook for one in given for hook in by_element)


def _bind(ddp: DDP, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return dict(_signature.bind(ddp, *args, **kwargs).arguments)
    except TypeError:
        return None


def _plain(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != "self"}


def parameters_digest(module: nn.Module) -> str:
    """A digest (16 hex digits) of the shapes and types of the parameters that DDP reduces, in order."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    reduced = [p for name, p in module.named_parameters() if name not in ignored and p.requires_grad]
    text = ";".join(f"{tuple(p.shape)}{p.dtype}" for p in reduced)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hooks_inside(module: nn.Module) -> list[dict[int, Any]]:
    """The hook dictionaries of all modules inside `module`, without its own; these are no copies."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [getattr(inner, name) for inner in module.modules() if inner is not module for name in names]
