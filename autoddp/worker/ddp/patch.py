"""Patches DDP in place, so that what happens to the script's objects is told and new ones are built as it is set.

The patch of the class reaches every name that a script has for it, and every subclass.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import AS_WRITTEN
from autoddp.knobs.ddp_arguments import GRADIENT_AS_BUCKET_VIEW, STATIC_GRAPH
from autoddp.worker.ddp import private
from autoddp.worker.ddp.arguments import as_arguments, bind, why_untouchable, without_self
from autoddp.worker.ddp.handlers import DdpEvents
from autoddp.worker.ddp.model import Model
from autoddp.worker.ddp.private import device_of, has_hook, module_parameters, ranks_of
from autoddp.worker.ddp.rebuild import construct as construct_of_torch
from autoddp.worker.ddp.rebuild import gradients_stay
from autoddp.worker.ddp.wrapped import Around, Wrapped, model_of, register_by_torch
from autoddp.worker.gradients.access import remove_all_handlers
from autoddp.worker.process.device import is_capturing
from autoddp.worker.process.rank_store import RankStore

_pickled = cast("Callable[[DDP], dict[str, Any]]", DDP.__getstate__)
_unpickle = cast("Callable[[DDP, dict[str, Any]], None]", DDP.__setstate__)


class Patch:
    """Patches DDP: reports what happens to the script's objects to `events`, and builds them with `configuration`."""

    has_built = False
    """Whether the script has built a DDP object in this process: what it becomes by `os.execv` is another program."""

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
        group = f"{zlib.crc32(repr(ranks_of(ddp)).encode()):08x}"
        number = self._built.get(group, 0)
        self._built[group] = number + 1
        return _name(group, number)

    def _model_of(self, ddp: DDP) -> Model:
        """The model that this new object has in common with earlier ones, or a new one."""
        self._models = [model for model in self._models if model.is_there]
        new = model_of(ddp)
        parameters = [p for p in module_parameters(ddp) if p.requires_grad]
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
        private.warn_at_the_scripts_line()
        DDP.__init__ = self._wrap_construction()  # type: ignore[method-assign]
        DDP.register_comm_hook = self._wrap_registration(register_by_torch)  # type: ignore[method-assign]
        builtin = self._wrap_registration(private.register_builtin_hook)
        private.replace_methods(builtin, self._wrap_static_graph())
        DDP.__getstate__ = self._wrap_pickling()  # type: ignore[method-assign]
        DDP.__setstate__ = self._wrap_unpickling()  # type: ignore[method-assign]
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """Tell nobody anything in a fork of a process that trains, as for an evaluation: it would speak for its parent.

        A fork from before the first object may be a rank that the script starts itself.
        """
        if Patch.has_built:
            self.events = DdpEvents()
            remove_all_handlers()

    def _watch_forward(self) -> None:
        """Patch the forward pass. This waits for the first object, because importing torch._dynamo takes a second."""
        if self._watches:
            return
        self._watches = True
        private.wrap_forward(self._tell_forward, self._tell_return)

    def _wrap_construction(self) -> Callable[..., None]:
        @functools.wraps(construct_of_torch)
        def construct(ddp: DDP, *args: Any, **kwargs: Any) -> None:
            given = bind(ddp, args, kwargs)
            if given is None:  # not a valid call: let torch raise its own error
                return construct_of_torch(ddp, *args, **kwargs)
            if private.will_use_python_reducer():
                construct_of_torch(ddp, **without_self(given))
                return self.events.python_reduces()
            takes = not why_untouchable(given, given["module"]) and self.events.takes(given["module"])
            configuration = self.configuration if takes else AS_WRITTEN
            self._watch_forward()
            private.tell_start(given)
            # If the script sets the argument itself, its gradients go where torch puts them.
            is_ours = bool(GRADIENT_AS_BUCKET_VIEW.of(configuration)) and not given.get(GRADIENT_AS_BUCKET_VIEW.name)
            stay = gradients_stay(given["module"]) if is_ours else contextlib.nullcontext()
            with self._inside_construction(), stay:
                construct_of_torch(ddp, **{**without_self(given), **as_arguments(configuration)})
            private.hear_start(ddp, given)
            wrapped = Wrapped(ddp, given, takes, self._name_of(ddp), self._model_of(ddp))
            wrapped.set_buffers(configuration)
            wrapped.set_cuts(configuration)
            if not self.samples:
                wrapped.leave_out_samples()
            Patch.has_built = True
            self.wrapped = [*self.alive(), wrapped]
            wrapped.register_hook(configuration, self.start_step, self.around)
            self.events.built(wrapped)

        # Some scripts pass on what they find among its arguments, by `inspect.getfullargspec`.
        vars(construct)["__signature__"] = inspect.signature(construct_of_torch)
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

            wrapped.hook_sees_buckets = register is register_by_torch and _sees_buckets((*args, *kwargs.values()))
            has_ours = has_hook(ddp) or wrapped.has_buckets_of_ours
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

        @functools.wraps(private.set_static_graph)
        def set_static_graph(ddp: DDP) -> None:
            private.set_static_graph(ddp)
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

    def _tell_forward(self, before: private.Method) -> private.Method:
        def _pre_forward(ddp: DDP, /, *inputs: Any, **kwargs: Any) -> Any:  # a model may have an argument `ddp`
            if self.of(ddp) is None:
                if _trains(ddp) and not private.uses_python_reducer(ddp):
                    self.events.unknown_trains()
                return before(ddp, *inputs, **kwargs)
            if is_capturing(device_of(ddp)):
                self.events.script_captures(ddp)
                return before(ddp, *inputs, **kwargs)
            self.events.forward_begins(ddp)
            inputs, kwargs = before(ddp, *inputs, **kwargs)
            self.events.called(ddp, inputs, kwargs)
            return inputs, kwargs

        return _pre_forward

    def _tell_return(self, after: private.Method) -> private.Method:
        def _post_forward(ddp: DDP, output: Any) -> Any:
            has_events = self.of(ddp) is not None and not is_capturing(device_of(ddp))
            return after(ddp, self.events.returned(ddp, output) if has_events else output)

        return _post_forward

    @contextlib.contextmanager
    def _inside_construction(self) -> Iterator[None]:
        self._constructing += 1
        try:
            yield
        finally:
            self._constructing -= 1


def _name(group: str, number: int) -> str:
    """The name of the `number`th object on its group."""
    return f"{group}/{number}"


def _trains(ddp: DDP) -> bool:
    """Whether the object's forward pass, which begins now, may have a backward pass that changes parameters."""
    return ddp.training and torch.is_grad_enabled() and any(p.requires_grad for p in module_parameters(ddp))


def around_ddps_own(around: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Enter `around()` whenever DDP itself reads an object's attributes: before and after the module's forward."""

    def wrapped(function: private.Method) -> private.Method:
        def inside(*args: Any, **kwargs: Any) -> Any:
            with around():
                return function(*args, **kwargs)

        return inside

    private.wrap_forward(wrapped, wrapped)


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


def watch_joins(begins: Callable[[DDP], None]) -> None:
    """Call `begins` where a script enters a `join()` that divides gradients by the ranks that still have inputs.

    All ranks enter it at the same place, also one that has no input at all.
    """
    join_hook: Callable[..., Any] = DDP.join_hook

    @functools.wraps(join_hook)
    def watched(ddp: DDP, **kwargs: Any) -> Any:
        if not kwargs.get("divide_by_initial_world_size", True):
            begins(ddp)
        return join_hook(ddp, **kwargs)

    DDP.join_hook = watched  # type: ignore[method-assign, assignment]


def _sees_buckets(given: tuple[Any, ...]) -> bool:
    """Whether these are the arguments of a hook whose result may depend on how gradients are put together in buckets.

    A few hooks of torch are known to give each element of a gradient the same value in whatever bucket it lies.
    """
    torchs = sys.modules.get("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
    if torchs is None:  # who gives one of them has imported it; torch may warn where it is imported
        return True
    by_element = torchs.allreduce_hook, torchs.fp16_compress_hook, torchs.bf16_compress_hook
    return not any(one is hook for one in given for hook in by_element)
