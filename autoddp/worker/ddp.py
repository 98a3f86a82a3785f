"""The single file that touches DistributedDataParallel's private names.

The class is patched in place, so that every name a script has for it, and every subclass, is covered.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import AS_WRITTEN, BY_NAME, Configuration
from autoddp.worker.hooks import Hook, hook_for

_construct = DDP.__init__
_register = DDP.register_comm_hook
_signature = inspect.signature(DDP.__init__)

Around = Callable[[Hook, dist.ProcessGroup], Hook]
"""Puts something around a hook; the group is the one it reduces over."""

AVAILABLE_ARGUMENTS = frozenset(name for name, knob in BY_NAME.items() if knob.ddp_argument) & set(
    _signature.parameters
)
"""The knobs of DDP's constructor that the installed torch has."""


class Wrapped:
    """One DDP object of the script: how it was written, and how to give it other arguments while it lives."""

    def __init__(self, ddp: DDP, arguments: dict[str, Any]) -> None:
        self._ddp = weakref.ref(ddp)  # the script decides how long its model lives
        self.arguments = {name: value for name, value in _plain(arguments).items() if name != "module"}
        self.script_hook: tuple[Any, Any] | None = None

    @property
    def ddp(self) -> DDP | None:
        """The object, or None once the script has dropped it."""
        return self._ddp()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What DDP reduces, in its order."""
        ddp = self.ddp
        return [p for p in ddp._module_parameters if p.requires_grad] if ddp is not None else []

    @property
    def is_compiled(self) -> bool:
        """Whether torch.compile was given the module, a part of it, or this object: it splits its graph by buckets."""
        ddp = self.ddp
        if ddp is None:
            return False
        inside = (isinstance(m, torch._dynamo.OptimizedModule) or m._compiled_call_impl for m in ddp.modules())
        around = (isinstance(h, dict) and h.get("_orig_mod") is ddp for h in gc.get_referrers(ddp))
        return any(inside) or any(around)

    def why_untouchable(self) -> str:
        """Why this object must stay as it was written, or nothing."""
        ddp = self.ddp
        if ddp is None:
            return ""
        if getattr(ddp, "_use_python_reducer", False):
            return "torch.compile's python_reducer is on"
        return _why_untouchable(self.arguments, ddp.module)

    def rebuild(self, configuration: Configuration, start_step: int | None, around: Around | None = None) -> None:
        """Run DDP's constructor again on the same object. Every rank does so at the same step boundary.

        `around` may put something around a hook of ours.
        """
        ddp = self.ddp
        if ddp is None:
            return
        arguments = {**self.arguments, **_as_arguments(configuration), "init_sync": False}
        _construct_again(ddp, arguments)
        if self.script_hook is not None:
            _register(ddp, *self.script_hook)
        else:
            _register_ours(ddp, configuration, start_step, around)


def _register_ours(ddp: DDP, configuration: Configuration, start_step: int | None, around: Around | None) -> None:
    found = hook_for(configuration, ddp.process_group, start_step)
    if found is not None:
        state, hook = found
        _register(ddp, state, around(hook, ddp.process_group) if around else hook)


def _why_untouchable(arguments: dict[str, Any], module: nn.Module) -> str:
    """In all these cases DDP registers a hook of its own, or goes by other arguments than ours."""
    if arguments.get("mixed_precision") is not None:
        return "DDP's own mixed_precision is on"
    if arguments.get("delay_all_reduce_named_params") is not None:
        return "delay_all_reduce_named_params is used"
    if any(hasattr(p, "_in_backward_optimizers") for p in module.parameters()):
        return "the optimizer runs inside backward"
    return ""


def _as_arguments(configuration: Configuration) -> dict[str, Any]:
    given = configuration.ddp_arguments
    if "bucket_cap_mb_list" in given:
        return given | {"bucket_cap_mb_list": list(configuration.plain()["bucket_cap_mb_list"])}
    # A cap means nothing beside a list that the script wrote, which DDP would prefer.
    return given | ({"bucket_cap_mb_list": None} if "bucket_cap_mb" in given and _has_list() else {})


def _has_list() -> bool:
    return "bucket_cap_mb_list" in AVAILABLE_ARGUMENTS


_MODULE_STATE = frozenset(nn.Module().__dict__)
_CARRIED_OVER = _MODULE_STATE | {"require_backward_grad_sync", "require_forward_param_sync", "_join_config"}


def _construct_again(ddp: DDP, arguments: dict[str, Any]) -> None:
    before = dict(ddp.__dict__)
    module = ddp.module
    # Both hold the old reducer, whose destructor takes its autograd hooks off the parameters.
    for name in ("reducer", "logger"):
        before.pop(name, None)
        ddp.__dict__.pop(name, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the script has seen the constructor's warnings once
        _construct(ddp, module, **arguments)
    for name, value in before.items():
        if name in _CARRIED_OVER or name not in ddp.__dict__:
            ddp.__dict__[name] = value


class Patch:
    """Watches the construction of DDP objects, from `install` on.

    `configuration(module)` is asked before each construction what to build it with; `built(wrapped)` is told after it,
    `script_registered(wrapped)` when the script registers a hook of its own, `forward_begins(ddp)` at each forward.
    """

    def __init__(self) -> None:
        self.wrapped: list[Wrapped] = []
        self.built: Callable[[Wrapped], None] = lambda wrapped: None
        self.script_registered: Callable[[Wrapped], None] = lambda wrapped: None
        self.forward_begins: Callable[[DDP], None] | None = None
        self.configuration: Callable[[nn.Module], Configuration] = lambda module: AS_WRITTEN
        self.around: Around | None = None
        """Put around each hook of ours."""
        self._constructing = 0

    def alive(self) -> list[Wrapped]:
        """The DDP objects that the script still holds, in order of construction."""
        self.wrapped = [wrapped for wrapped in self.wrapped if wrapped.ddp is not None]
        return self.wrapped

    def install(self) -> None:
        """Patch the class in place."""
        DDP.__init__ = self._wrap_construction()  # type: ignore[method-assign]
        DDP.register_comm_hook = self._wrap_registration()  # type: ignore[method-assign]
        if self.forward_begins is not None:
            DDP._pre_forward = self._wrap_forward(self.forward_begins)  # type: ignore[method-assign]

    def _wrap_construction(self) -> Callable[..., None]:
        @functools.wraps(_construct)
        def construct(ddp: DDP, *args: Any, **kwargs: Any) -> None:
            given = _bind(ddp, args, kwargs)
            if given is None:  # not a valid call: torch's own error is the right one
                return _construct(ddp, *args, **kwargs)
            untouchable = _why_untouchable(given, given["module"])
            configuration = AS_WRITTEN if untouchable else self.configuration(given["module"])
            with self._inside_construction():
                _construct(ddp, **{**_plain(given), **_as_arguments(configuration)})
            self._remember(Wrapped(ddp, given), configuration)

        return construct

    def _remember(self, wrapped: Wrapped, configuration: Configuration) -> None:
        self.wrapped.append(wrapped)
        ddp = wrapped.ddp
        assert ddp is not None
        _register_ours(ddp, configuration, None, self.around)
        self.built(wrapped)

    def _wrap_registration(self) -> Callable[..., None]:
        @functools.wraps(_register)
        def register_comm_hook(ddp: DDP, state: object, hook: Callable[..., Any]) -> None:
            wrapped = next((w for w in self.wrapped if w.ddp is ddp), None)
            if wrapped is None or self._constructing:
                return _register(ddp, state, hook)
            if getattr(ddp, "_comm_hooks", None) and wrapped.script_hook is None:
                # The recipe's hook stands where the script's belongs, and a reducer takes only one.
                wrapped.rebuild(self.configuration(ddp.module), None, self.around)
            _register(ddp, state, hook)
            wrapped.script_hook = (state, hook)
            self.script_registered(wrapped)

        return register_comm_hook

    @staticmethod
    def _wrap_forward(begins: Callable[[DDP], None]) -> Callable[..., Any]:
        before = cast("Callable[..., Any]", DDP._pre_forward)

        @functools.wraps(before)
        def _pre_forward(ddp: DDP, *inputs: Any, **kwargs: Any) -> Any:
            begins(ddp)
            return before(ddp, *inputs, **kwargs)

        # Dynamo skips torch's own file, and must skip this frame in it too.
        disable = cast("Callable[..., Any]", torch.compiler.disable)
        return cast("Callable[..., Any]", disable(_pre_forward, recursive=False))

    @contextlib.contextmanager
    def _inside_construction(self) -> Iterator[None]:
        self._constructing += 1
        try:
            yield
        finally:
            self._constructing -= 1


def _bind(ddp: DDP, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return dict(_signature.bind(ddp, *args, **kwargs).arguments)
    except TypeError:
        return None


def _plain(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != "self"}


def parameters_digest(module: nn.Module) -> str:
    """16 hex digits over the shapes and types of the parameters that DDP reduces, in order."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    reduced = [p for name, p in module.named_parameters() if name not in ignored and p.requires_grad]
    text = ";".join(f"{tuple(p.shape)}{p.dtype}" for p in reduced)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hooks_inside(module: nn.Module) -> list[dict[int, Any]]:
    """The hook dictionaries of all modules inside this one, its own left out; they stay the same objects."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [getattr(inner, name) for inner in module.modules() if inner is not module for name in names]


class ReductionSwitch:
    """DDP's `require_backward_grad_sync` as a property that can be overruled for all objects at once.

    The headroom is measured with reduction off as under `no_sync`, also in scripts that set the attribute themselves.
    """

    _NAME = "require_backward_grad_sync"

    def __init__(self) -> None:
        self.on = True
        self.put_off = False
        """Whether the present forward pass's backward is one of several, and not the last."""

    def install(self) -> None:
        """Put the property on the class; the instances keep their own values in their dictionaries."""
        setattr(DDP, self._NAME, property(self._get, self._set))

    def as_written(self, ddp: DDP) -> bool:
        """Whether the script has this object reduce now."""
        return bool(ddp.__dict__.get(self._NAME, True))

    def _get(self, ddp: DDP) -> bool:
        return self.on and not self.put_off and self.as_written(ddp)

    def _set(self, ddp: DDP, value: bool) -> None:
        ddp.__dict__[self._NAME] = value


def broadcast_parameters(ddp: DDP) -> None:
    """Every parameter and buffer as rank 0 has it; whatever ran without reduction has made them differ."""
    source = dist.get_global_rank(ddp.process_group, 0)
    tensors = [t.detach() for t in (*ddp.module.parameters(), *ddp.module.buffers())]
    works = [dist.broadcast(t, src=source, group=ddp.process_group, async_op=True) for t in tensors]
    for work in works:
        work.wait()
