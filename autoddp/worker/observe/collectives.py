"""Sees the script's own collectives, such as a barrier or the mean of its losses, where all of them pass.

    collectives.tell_waits(begins=lambda: "other", ends=lambda stage: None)    # for the stages of a step
    collectives.record(CallRecorder(plan))                                     # for the calls themselves

Each function of torch.distributed that moves something calls a method of a `ProcessGroup`, and so do object
collectives, batches of `P2POp`, coalesced calls, and scripts that use a group directly. A method that starts something
returns a `Work`: torch's own signatures say which methods these are, so no list has to be complete. They are patched
in the class, once, when torch is imported. The functions of torch.distributed stay what they are, because torch.compile
knows them by identity; but for those that pickle objects or make groups, which it cannot compile. torch waits for the
end of a blocking call by `Work.wait`, as the script does for one with `async_op=True`, or has the backend wait for it.

What DDP reduces is called in C++ and never comes this way. Nor do functional collectives (`DTensor`), which go through
torch's dispatcher, and methods that a subclass of `ProcessGroup` in Python overrides.

pybind11 looks for methods of such subclasses by name, in Python, and would take a patched method for one of them. It
leaves out a method that is just being called, which it knows by the name of the code and by the first argument. So each
patched method has its own name and takes `self` as torch's does.
"""

from __future__ import annotations

import functools
import re
import sys
import time
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, Protocol

import torch.distributed as dist

from autoddp.wire.recorded_calls import WITH_GROUPS
from autoddp.worker.observe.training_thread import TrainingThread

_RETURNS_WORK = re.compile(r"-> \S*\bWork$", re.MULTILINE)
_WAITS_BY_ITSELF = "monitored_barrier"  # the only one that returns when all is done, and no `Work`
_FOR_OBJECTS = ("_object", "_object_list")
"""How the names of functions end that pickle what they send, in calls of their own."""


class Recorder(Protocol):
    """Notes calls; see `CallRecorder`. It must not raise."""

    on: bool
    """Whether calls are noted."""
    begins: Callable[[], None] | None
    """What is called before each call, or None; where it is there, `wait_begins` is called before each wait."""

    def begin_anew(self) -> None:
        """Forget the calls so far."""

    def pause(self) -> None:
        """Note nothing until `resume`."""

    def resume(self) -> None:
        """Note calls again."""

    def noting(self, method: str) -> Callable[[Any, Any, Any, float, float], None]:
        """What is called when that method of a group has returned.

        With the group, the arguments, the work (None where all is done), and when the call began and returned.
        """

    def wait_begins(self) -> None:
        """Something is about to wait for the end of a call."""

    def waited(self, work: Any, began: float, ended: float) -> None:
        """Something has waited for the end of `work`."""

    def made(self, what: str, group: Any, began: float, cpu: float, ended: float) -> None:
        """The script has made this process group, or destroyed it; None: all of them.

        `cpu`: the CPU time of this thread when that began.
        """

    def pickled(self, what: str, began: float, cpu: float, ended: float) -> None:
        """The script has called a function for objects, whose own calls were noted before."""


class Collectives:
    """The patches, and who hears of them. There is one object of it in a process, `collectives`."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        """Who notes calls; None if nobody does."""
        self.begins: Callable[[], str] | None = None
        """See `tell_waits`; None if nobody wants to know."""
        self.tells = False
        """Whether waits are told at present. Where ranks lose their core in each wait, each line in Python is dear."""
        self.ends: Callable[[str], None] = lambda _stage: None
        """See `tell_waits`."""
        self._trains: TrainingThread | None = None
        self._is_installed = False

    def tell_waits(self, begins: Callable[[], str], ends: Callable[[str], None]) -> None:
        """While `tells` is set, tell when a thread waits for a collective: `begins()` gives what `ends` is called with.

        Only the thread that has called this tells: the one that trains.
        """
        self._trains = TrainingThread()
        self.begins, self.ends = begins, ends
        self._install()

    def record(self, recorder: Recorder) -> None:
        """Let a recorder note every call of this process from here on."""
        self.recorder = recorder
        self._install()

    def _install(self) -> None:
        if self._is_installed:
            return
        self._is_installed = True
        for name in methods_that_start_something():
            setattr(dist.ProcessGroup, name, self._starting(name, getattr(dist.ProcessGroup, name)))
        if (barrier := getattr(dist.ProcessGroup, _WAITS_BY_ITSELF, None)) is not None:
            setattr(dist.ProcessGroup, _WAITS_BY_ITSELF, self._starting(_WAITS_BY_ITSELF, barrier, waits=True))
        dist.Work.wait = self._waiting(dist.Work.wait)  # type: ignore[method-assign]
        for name, function in list(vars(dist.distributed_c10d).items()):
            for_objects = name.endswith(_FOR_OBJECTS) and not name.startswith("_")
            # By the name first: torch warns of some of its objects where they are looked at.
            if (name in WITH_GROUPS or for_objects) and isinstance(function, FunctionType):
                patched = self._noting(name, function, for_objects)
                for module in _modules_that_have(name, function):
                    setattr(module, name, patched)

    def _starting(self, name: str, original: Any, waits: bool = False) -> Callable[..., Any]:
        clock = time.perf_counter

        known: Recorder | None = None
        note: Callable[..., None] = print

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal known, note
            recorder = collectives.recorder
            stage = collectives.wait_begins() if collectives.tells and (waits or _blocks(args, kwargs)) else None
            if recorder is None or not recorder.on:
                try:
                    return original(self, *args, **kwargs)
                finally:
                    collectives.wait_ends(stage)
            if (begins := recorder.begins) is not None:  # another thread may end the looks at this moment
                begins()
            began = clock()
            try:
                work = original(self, *args, **kwargs)
            finally:
                if stage is not None:
                    collectives.wait_ends(stage)
            returned = clock()
            # After the call: the backend is at work meanwhile.
            if recorder is not known:
                known, note = recorder, recorder.noting(name)
            note(self, args or tuple(kwargs.values()), work, began, returned)
            return work

        return _named(method, name, original)

    def _waiting(self, original: Any) -> Any:
        clock = time.perf_counter

        def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            recorder = collectives.recorder
            stage = collectives.wait_begins() if collectives.tells else None
            if recorder is not None and recorder.on and recorder.begins is not None:
                recorder.wait_begins()
            began = clock()
            try:
                result = original(self, *args, **kwargs)
            finally:
                if stage is not None:
                    collectives.wait_ends(stage)
            if recorder is not None and recorder.on:
                recorder.waited(self, began, clock())
            return result

        return _named(wait, "wait", original)

    def _noting(self, name: str, function: Callable[..., Any], for_objects: bool) -> Callable[..., Any]:
        """`function`, whose calls the recorder notes: one for objects, else one that makes or destroys groups."""

        @functools.wraps(function)
        def patched(*args: Any, **kwargs: Any) -> Any:
            recorder = self.recorder
            if recorder is None or not recorder.on:
                return function(*args, **kwargs)
            began, cpu = time.perf_counter(), time.thread_time()
            result = function(*args, **kwargs)
            if for_objects:
                recorder.pickled(name, began, cpu, time.perf_counter())
            else:
                group = result if result is not None else args[0] if args else kwargs.get("group")
                recorder.made(name, group, began, cpu, time.perf_counter())
            return result

        return patched

    def wait_begins(self) -> str | None:
        """What a wait interrupts; None where nobody wants to know, or another thread waits."""
        return self.begins() if self.begins is not None and self._trains else None

    def wait_ends(self, stage: str | None) -> None:
        """The wait has ended that has interrupted this."""
        if stage is not None:
            self.ends(stage)


def _modules_that_have(name: str, function: Any) -> list[ModuleType]:
    """Modules of torch.distributed that have it by its own name, as that of `DeviceMesh`, which makes groups by it."""
    modules = [one for named, one in [*sys.modules.items()] if f"{named}.".startswith("torch.distributed.")]
    return [one for one in modules if isinstance(one, ModuleType) and vars(one).get(name) is function]


def _blocks(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether torch's function that has called a method waits for the end of the call; it says so in the options.

    From torch 2.8 on NCCL waits by itself then, on the stream of the script, and returns no `Work`.
    """
    options = args[-1] if args else next(reversed(kwargs.values()), None)  # they come last
    return getattr(options, "asyncOp", True) is False


def methods_that_start_something() -> list[str]:
    """The names of the methods of `ProcessGroup` that return a `Work`, as their signatures say."""
    return [name for name, one in vars(dist.ProcessGroup).items() if _RETURNS_WORK.search(one.__doc__ or "")]


def _named(method: Callable[..., Any], name: str, original: Any) -> Callable[..., Any]:
    """`method` under torch's name, for people and for pybind11, see the module."""
    assert isinstance(method, FunctionType)
    method.__code__ = method.__code__.replace(co_name=name)
    return functools.update_wrapper(method, original)


collectives = Collectives()
"""The one of this process."""
