"""What goes between the host and the device: batches that are copied there, and values for which the script waits.

Both classes replace methods of `torch.Tensor` for as long as somebody looks, and put them back.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import sys
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch

from autoddp.worker.observe.training_thread import TrainingThread
from autoddp.worker.process.device import current_stream, is_gpu, mark

_MISSING = object()
_MOST_LINES = 5  # that are told: those that wait longest
_LARGEST = 2**20  # bytes of a tensor whose value may be late
_DEEPEST = 40  # frames that tell one call from another
_READS = {
    "item": ".item()",
    "tolist": ".tolist()",
    "__float__": "float()",
    "__int__": "int()",
    "__format__": "a formatted string",
    "__repr__": "print()",
    "cpu": ".cpu()",
    "to": ".to('cpu')",
}
"""Methods of a tensor that wait for its value, as they are told to the user. A value that decides what is run next is
not among them (`if tensor:`)."""
_COPIES = ("cpu", "to")
"""Methods whose result may be a part of what is differentiated."""


class Methods:
    """Attributes of a class or a module that are replaced for a while."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._before: dict[str, Any] = {}

    @property
    def replaced(self) -> bool:
        """Whether any is replaced now."""
        return bool(self._before)

    def replace(self, name: str, wrapped: Callable[[Any], Any]) -> None:
        """Put `wrapped(present)` in the place of the attribute."""
        self._before[name] = vars(self._owner).get(name, _MISSING)
        setattr(self._owner, name, wrapped(getattr(self._owner, name)))

    def restore(self) -> None:
        """Put all of them back; without effect if none is replaced. What the class inherits, it inherits again."""
        for name, before in self._before.items():
            if before is _MISSING:
                delattr(self._owner, name)
            else:
                setattr(self._owner, name, before)
        self._before = {}


class CopiesToDevice:
    """Sees tensors that go from the host to a device, by the two methods that scripts use for it.

    `begin()` gives what `end` is called with.
    """

    def __init__(self, begin: Callable[[], str], end: Callable[[str], None]) -> None:
        self._begin, self._end = begin, end
        self._methods = Methods(torch.Tensor)
        self._trains = TrainingThread()
        self.non_blocking = False
        """Whether the host does not wait for copies from pinned memory, whatever the script asks for."""

    def watch(self) -> None:
        """Replace the methods."""
        for name in ("to", "cuda"):
            self._methods.replace(name, functools.partial(self._wrapped, name))

    def stop(self) -> None:
        """Put them back; without effect if nobody watches."""
        self._methods.restore()

    def _wrapped(self, name: str, copy: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(copy)
        def patched(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            goes_away = name == "cuda" or _target(args, kwargs) not in (None, "cpu")
            if tensor.device.type != "cpu" or not goes_away or not self._trains:
                return copy(tensor, *args, **kwargs)
            if self.non_blocking and len(args) <= 1 and tensor.is_pinned():  # a second argument may be non_blocking
                kwargs["non_blocking"] = True
            before = self._begin()
            try:
                return copy(tensor, *args, **kwargs)
            finally:
                self._end(before)

        return patched


class DeviceWaits:
    """The script's own lines that wait for the device: `loss.item()`, `float(loss)`, `print(loss)`, a synchronisation.

    waits.watch(True)
    …                            # some steps
    waits.longest                # {"train.py:41 .item()": 0.8}: seconds
    waits.give_late(True)        # from now on such a line is given the value that it asked for the last time

    A line that is given the last value does not wait for the present one. Calls from different places, or through
    different callers, have values of their own, so ranks that call alike are given values that are late alike. Only
    small tensors of floating-point numbers are late: others may be sizes or decisions. What torch's own modules read is
    left alone: a gradient scaler must know at once whether to step.
    """

    def __init__(self, device_type: str = "cuda") -> None:
        self._type = device_type
        self._tensor, self._cuda = Methods(torch.Tensor), Methods(torch.cuda)
        self._watches = self._late = False
        self._waited: dict[str, float] = {}
        self._last: dict[object, _HostCopy] = {}
        self._trains = TrainingThread()

    def watch(self, on: bool) -> None:
        """Note from here on how long each line waits; or no more."""
        self._watches = on
        if on:
            self._waited = {}
        self._patch()

    def give_late(self, on: bool) -> None:
        """Give values of the last call from here on; or those that are asked for, as written."""
        self._late = on
        self._last = {}
        self._patch()

    @property
    def longest(self) -> dict[str, float]:
        """Seconds by line and call, of the lines that have waited longest since `watch(True)`."""
        order = sorted(self._waited, key=lambda line: -self._waited[line])
        return {line: self._waited[line] for line in order[:_MOST_LINES]}

    def _patch(self) -> None:
        wanted = self._watches or self._late
        if wanted and not self._tensor.replaced:
            for name in _READS:
                self._tensor.replace(name, functools.partial(self._reading, name))
            self._cuda.replace("synchronize", self._synchronizing)
        elif not wanted:
            self._tensor.restore()
            self._cuda.restore()

    def _reading(self, name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(read)
        def patched(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            elsewhere = name == "to" and _target(args, kwargs) != "cpu"
            if tensor.device.type != self._type or elsewhere or not self._trains:
                return read(tensor, *args, **kwargs)
            line = _line_of_the_script()
            if line is None:
                return read(tensor, *args, **kwargs)
            if self._late and _may_be_late(tensor) and not (name in _COPIES and tensor.requires_grad):
                tensor = self._value_of_last_call(line, tensor)
            return self._timed(line, _READS[name], read, tensor, *args, **kwargs)

        return patched

    def _synchronizing(self, synchronize: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(synchronize)
        def patched(*args: Any, **kwargs: Any) -> None:
            line = _line_of_the_script() if self._trains else None
            if line is None:
                synchronize(*args, **kwargs)
            elif not self._late:
                self._timed(line, "torch.cuda.synchronize()", synchronize, *args, **kwargs)

        return patched

    def _timed(self, line: FrameType, call: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            if self._watches:
                place = f"{os.path.basename(line.f_code.co_filename)}:{line.f_lineno} {call}"
                self._waited[place] = self._waited.get(place, 0.0) + time.perf_counter() - began

    def _value_of_last_call(self, line: FrameType, tensor: torch.Tensor) -> torch.Tensor:
        """The value on the host that the line's last call asked for; its first call is given `tensor`, and waits."""
        place = _calls(line), tensor.shape, tensor.dtype
        last = self._last.get(place)
        self._last[place] = _HostCopy(tensor)
        return tensor if last is None else last.value()


class _HostCopy:
    """A copy of a tensor on its way to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        on_gpu = is_gpu(tensor.device)
        self._host = torch.empty_like(tensor.detach(), device="cpu", pin_memory=on_gpu)
        self._host.copy_(tensor.detach(), non_blocking=True)
        self._done = mark(current_stream(tensor.device), timed=False) if on_gpu else None

    def value(self) -> torch.Tensor:
        """The copy, once it is there."""
        if self._done is not None:
            self._done.synchronize()
        return self._host


@functools.cache
def _place(code: CodeType, instruction: int) -> object:
    """The place of a call in the source.

    From Python 3.11 on, the interpreter changes how a call that is often made is coded.
    """
    if sys.version_info < (3, 11):
        return instruction
    return next(itertools.islice(code.co_positions(), instruction // 2, None))


def _calls(line: FrameType) -> tuple[object, ...]:
    """The place of a call, and those of its callers: what one line reads may be another thing for each of them."""
    found: list[object] = []
    frame: FrameType | None = line
    while frame is not None and len(found) < _DEEPEST:
        found.append((frame.f_code, _place(frame.f_code, frame.f_lasti)))
        frame = frame.f_back
    return tuple(found)


def _may_be_late(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and tensor.is_floating_point() and tensor.numel() * tensor.element_size() <= _LARGEST


def _target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The kind of device to which `Tensor.to` with these arguments copies; None where it stays."""
    given = args[0] if args else kwargs.get("device", kwargs.get("other"))
    if isinstance(given, torch.Tensor):
        given = given.device
    return torch.device(given).type if isinstance(given, str | int | torch.device) else None


def _line_of_the_script() -> FrameType | None:
    """The frame that has called one of the functions above; None if it is torch's or autoddp's."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    if frame is None or str(frame.f_globals.get("__name__")).partition(".")[0] in ("torch", "autoddp"):
        return None
    return frame
