"""The one place that stands in front of what torch does with gradients: clip, unscale, use and clear them.

    class Steps(GradientHandler):
        def after_step(self, optimizer):
            print("an optimizer has stepped")

    add_handler(Steps())

Each function of torch is patched once, and only when a handler comes that has a method for it. A handler must be added
before the script binds these functions to names of its own.

What the script itself reads as `p.grad` is seen by `OwnReads`.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autoddp.worker.ddp.private import skipped_by_dynamo
from autoddp.worker.ddp.wrapped import Wrapped


class GradientHandler:
    """Is told what torch does with gradients, and asked whether it may. By itself each method does nothing.

    Several handlers are all told and asked, in the order in which they were added; one that says yes is enough.
    """

    def before_reading(self, parameters: Sequence[torch.Tensor]) -> bool:
        """A function of torch other than an optimizer's `step` is about to read the gradients of these parameters.

        For `get_total_norm` these are the gradients themselves, which is all that the script gives.

        Returns whether they are kept for a later step of the script. If so, torch only reads them: clipping tells their
        norm, `unscale_` does nothing, and a GradScaler calls the optimizer without looking for infinite gradients.
        """
        return False

    def norm_read(self, function: str, parameters: Sequence[torch.Tensor], norm: torch.Tensor) -> torch.Tensor:
        """The function of torch with this name has read the gradients' norm; the script gets what this one returns."""
        return norm

    def after_reading(self) -> None:
        """The function that `before_reading` announced has ended; the gradients may be others now."""

    def given(self, optimizer: Optimizer) -> None:
        """The script gives parameters to an optimizer, when it makes the optimizer or later."""

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """An optimizer is about to step. With a closure it runs backward passes itself."""

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""

    def step_skipped(self, optimizer: Optimizer) -> None:
        """A GradScaler has found infinite gradients and has not called the optimizer."""

    def keeps(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether `zero_grad`, which the script has called for these parameters, must leave their gradients alone."""
        return False

    def keeps_scale(self) -> bool:
        """Whether a GradScaler must keep its scale, although the script has called `update`."""
        return False


_handlers: tuple[GradientHandler, ...] = ()
_steps_ended = 0
"""Ended steps of all optimizers of this process, counted once a handler asks for the end of steps."""


def add_handler(handler: GradientHandler) -> None:
    """Tell this one too, after those that are there already."""
    global _handlers
    _handlers = (*_handlers, handler)
    for place in [place for place in _unpatched if any(_has(handler, event) for event in place[0])]:
        _unpatched.remove(place)
        place[1]()


def remove_handler(handler: GradientHandler) -> None:
    """Tell this one no more. One of its own methods may call this."""
    global _handlers
    _handlers = tuple(other for other in _handlers if other is not handler)


def remove_all_handlers() -> None:
    """Tell nobody any more."""
    global _handlers
    _handlers = ()


def _has(handler: GradientHandler, event: Callable[..., Any]) -> bool:
    return getattr(type(handler), event.__name__) is not event


def _tell(event: Callable[..., Any], *what: Any) -> bool:
    """Call this method of all handlers. Whether one of them says yes."""
    return True in [getattr(handler, event.__name__)(*what) for handler in _handlers]


def _norm_read(function: str, parameters: Sequence[torch.Tensor], norm: torch.Tensor) -> torch.Tensor:
    for handler in _handlers:
        norm = handler.norm_read(function, parameters, norm)
    return norm


@functools.cache
def keep_compilers_out() -> None:
    """Have torch.compile leave the handlers alone: the script may compile a function that clips, steps and clears.

    Call this when there is a model: to tell torch.compile so imports its machinery, which takes a second.
    """
    global _tell, _norm_read
    _tell, _norm_read = torch.compiler.disable(_tell), torch.compiler.disable(_norm_read)


def parameters_of(wrapped: Iterable[Wrapped]) -> list[nn.Parameter]:
    """All parameters whose gradients these DDP objects reduce, in their order."""
    return [p for one in wrapped for p in one.parameters]


def held_by(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters that it steps. A GradScaler that is switched off also takes objects that have none."""
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def are_reduced(tensors: Iterable[torch.Tensor], wrapped: Iterable[Wrapped]) -> bool:
    """Whether these DDP objects reduce any of these parameters, or of these gradients."""
    given = ids_of(tensors)
    return any(id(p) in given or id(p.grad) in given for p in parameters_of(wrapped))


def ids_of(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """What tells these tensors from others, without keeping them alive."""
    return frozenset(map(id, tensors))


class OwnReads:
    """Notices gradients that the script itself reads, as `p.grad`, between `begin` and `end`.

    What torch and autoddp read does not count, nor does `p.grad is None`. See also `has_read`.
    """

    def __init__(self) -> None:
        self._watched: frozenset[int] = frozenset()
        self._read: set[int] = set()  # ids of the gradients

    def begin(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watch the gradients of these parameters until `end`; nothing is done where some are watched already."""
        if not self._watched:
            self._watched = ids_of(parameters)
            _readers.append(self)
            nn.Parameter.grad = _watched_grad()  # type: ignore[assignment]

    def end(self) -> None:
        """Watch nothing."""
        if self._watched:
            self._watched, self._read = frozenset(), set()
            _readers.remove(self)
            if not _readers:
                del nn.Parameter.grad

    def read(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """The script reads the gradient of this parameter."""
        if id(parameter) in self._watched:
            self._read.add(id(gradient))

    def has_read(self, given: Iterable[torch.Tensor] = ()) -> bool:
        """Whether the script has read a gradient since this was asked before.

        Those that are among `given` do not count: the script has read them for a function of torch that gets them now.
        """
        read, self._read = self._read, set()
        return not read <= ids_of(given)


_GRAD: Any = torch.Tensor.grad
_readers: list[OwnReads] = []


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a parameter, as torch has it: `p.grad` is slower while gradients are watched."""
    gradient: torch.Tensor | None = _GRAD.__get__(parameter)
    return gradient


@functools.cache
def _watched_grad() -> property:
    """The property in the place of torch's `grad`, while gradients are watched and no longer: it slows each read down.

    torch.compile must leave these functions alone. To tell it so imports its machinery, which takes a second: so this
    waits until there is a model.
    """
    note = torch.compiler.disable(_note)
    here = sys._getframe()  # `inspect` would build the whole stack

    def frames_to_here() -> int:
        frame, count = sys._getframe(), 0
        while frame is not here and frame.f_back is not None:
            frame, count = frame.f_back, count + 1
        return count

    frames: int = skipped_by_dynamo(frames_to_here)()  # more than one: some versions of torch put a function around it

    def read(parameter: nn.Parameter) -> torch.Tensor | None:
        gradient: torch.Tensor | None = _GRAD.__get__(parameter)
        reader = sys._getframe(frames)
        note(parameter, gradient, str(reader.f_globals.get("__name__", "")), reader.f_code, reader.f_lasti)
        return gradient

    return property(skipped_by_dynamo(read), _GRAD.__set__, _GRAD.__delete__)


def _note(parameter: nn.Parameter, gradient: torch.Tensor | None, module: str, code: CodeType, place: int) -> None:
    """Tell who watches that the code at `place`, of that module, reads a gradient."""
    if module.partition(".")[0] not in _NOT_THE_SCRIPT and not _compares_with_none(code, place):
        for one in _readers:
            one.read(parameter, gradient)


@functools.lru_cache(maxsize=256)
def _compares_with_none(code: CodeType, place: int) -> bool:
    """Whether the value of the instruction at `place` is only compared with None.

    Versions of Python have other instructions for that; one that is not known here counts as a read.
    """
    following = (one for one in dis.get_instructions(code) if one.offset > place)
    first, second = next(following, None), next(following, None)
    if first is None or second is None:
        return False
    jumps = first.opname.startswith("POP_JUMP") and first.opname.endswith("NONE")
    return jumps or (first.opname == "LOAD_CONST" and first.argval is None and second.opname == "IS_OP")


_NOT_THE_SCRIPT = ("torch", __name__.partition(".")[0])


def _patch(wrapper: Callable[..., Any], owners: Iterable[Any], *names: str) -> None:
    """Put `wrapper`, whose first argument is the original function, in its place wherever an owner has one."""
    patched: dict[Any, Callable[..., Any]] = {}
    for owner, name in itertools.product(owners, names):
        function = getattr(owner, name, None)
        if function is not None:
            # A function under two names stays one: pickle refuses a function that is another one where it is defined.
            patched[function] = patched.get(function) or _wrapped(function, wrapper)
            setattr(owner, name, patched[function])


def _wrapped(function: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return wrapper(function, *args, **kwargs)

    return patched


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not _handlers:  # torch.compile takes a step of the script's whole then, also with fullgraph=True
        return
    has_closure = any(callable(value) for value in (*args[1:], *kwargs.values()))
    _tell(GradientHandler.before_step, optimizer, has_closure)


def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    global _steps_ended
    if not _handlers:
        return
    _steps_ended += 1
    _tell(GradientHandler.after_step, optimizer)


def _zero_grad(clear: Callable[..., None], owner: Optimizer | nn.Module, *args: Any, **kwargs: Any) -> None:
    parameters = held_by(owner) if isinstance(owner, Optimizer) else list(owner.parameters())
    if not _tell(GradientHandler.keeps, parameters):
        clear(owner, *args, **kwargs)


def _given(add_param_group: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    add_param_group(optimizer, *args, **kwargs)
    _tell(GradientHandler.given, optimizer)


def _clip(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    call = _signature(function).bind(*args, **kwargs)
    first, given = next(iter(call.arguments.items()))
    parameters = [given] if isinstance(given, torch.Tensor) else list(given)
    call.arguments[first] = parameters or given  # torch warns of an empty generator
    if _tell(GradientHandler.before_reading, parameters):
        call.arguments.update({name: math.inf for name in _LIMITS if name in call.arguments})
    returned = function(*call.args, **call.kwargs)
    if isinstance(returned, torch.Tensor):
        returned = _norm_read(function.__name__, parameters, returned)
    _tell(GradientHandler.after_reading)
    return returned


def _unscale(unscale: Callable[..., None], scaler: Any, optimizer: Optimizer) -> None:
    if not scaler.is_enabled():
        return
    if not _tell(GradientHandler.before_reading, held_by(optimizer)):
        unscale(scaler, optimizer)
    _tell(GradientHandler.after_reading)


def _step_scaled(step: Callable[..., Any], scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    # For a fused optimizer the scaler looks for infinite gradients itself, before it calls the optimizer.
    if scaler.is_enabled() and _tell(GradientHandler.before_reading, held_by(optimizer)):
        return optimizer.step(*args, **kwargs)
    before, returned = _steps_ended, step(scaler, optimizer, *args, **kwargs)
    if _steps_ended == before:
        _tell(GradientHandler.step_skipped, optimizer)
    return returned


def _update(update: Callable[..., None], scaler: Any, *args: Any, **kwargs: Any) -> None:
    if not _tell(GradientHandler.keeps_scale):
        update(scaler, *args, **kwargs)


_signature = functools.cache(inspect.signature)
_LIMITS = ("max_norm", "clip_value")
"""Parameters of the functions that clip: infinite, they change nothing."""
_CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "get_total_norm", "clip_grads_with_norm_")
_SCALER = torch.amp.GradScaler

_unpatched: list[tuple[list[Callable[..., Any]], Callable[[], object]]] = [
    ([GradientHandler.before_step], lambda: register_optimizer_step_pre_hook(_before_step)),
    (
        [GradientHandler.after_step, GradientHandler.step_skipped],
        lambda: register_optimizer_step_post_hook(_after_step),
    ),
    ([GradientHandler.keeps], lambda: _patch(_zero_grad, (Optimizer, nn.Module), "zero_grad")),
    ([GradientHandler.given], lambda: _patch(_given, (Optimizer,), "add_param_group")),
    ([GradientHandler.before_reading], lambda: _patch(_clip, (clip_grad, nn.utils), *_CLIPPING)),
    ([GradientHandler.before_reading], lambda: _patch(_unscale, (_SCALER,), "unscale_")),
    ([GradientHandler.before_reading, GradientHandler.step_skipped], lambda: _patch(_step_scaled, (_SCALER,), "step")),
    ([GradientHandler.keeps_scale], lambda: _patch(_update, (_SCALER,), "update")),
]
"""Methods of a handler, and what patches the functions that they need; of functions that are still torch's own."""
