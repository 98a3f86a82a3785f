"""Sees where a script first uses what a collective has changed, for some steps: then it could be waited for there.

    watch = FirstUses(script_frame, say)
    if watch.begin(now):          # between two operations of the script
        watch.called(...)         # each call and its wait, until `watch.is_over(now)`
        watch.end()

The source does not tell it: an optimizer, a view or a module may hold the tensor under another name. So every operation
is looked at that reaches torch's dispatcher, also in a backward pass, by the mode that torch has for that; and the
methods that read a tensor past it, such as `tolist`. They all stay what they are, and take some microseconds longer
meanwhile. (A mode for functions would stand between the script and the functions of torch.distributed.)

Whatever touches the memory counts, except for making a view, and for `tensor /= number` or `*=`, which could wait, too.
Memory that was freed and given to another tensor counts as touched too early, so nothing is promised that could not be
done. What a compiled function reads is not seen: where torch has compiled one in this process, nothing is said.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from autoddp.wire.recorded_calls import LAST_NTH, BuildsNamed, HiddenNamed, UsedNamed, WaitsNamed
from autoddp.worker.observe.host_device import Methods

_SHORTEST, _LONG, _LONGEST = 0.3, 1.0, 3.0  # seconds of a watch; the second where no optimizer tells what a step is
_OFTEN = 3  # times that each place is seen, from which the shortest watch is long enough
_CLEARLY = 2 / 3  # of the calls of a place
_MOST_BETWEEN = 16  # calls; a script with two buffers in turns uses the result after the next call of the same place
_PAST_THE_DISPATCHER = ("tolist", "numpy", "data_ptr", "untyped_storage", "__dlpack__")
"""Methods that read a tensor, or let others read it. Pickling takes the storage, and `__array__` is `numpy`."""
_OVERWRITES = ("aten::copy_", "aten::zero_", "aten::fill_")
"""Operations whose result has nothing of the first thing that they are given."""
_SCALES = ("aten::div_", "aten::mul_", "aten::_foreach_div_", "aten::_foreach_mul_")
"""Operations that make a mean of a sum, in place: if it is by a number, they can be moved with the wait."""
_BRINGS_IN = "aten::lift_fresh"
"""What `torch.tensor` ends with: memory that was filled past the dispatcher."""
_BRINGS_NOTHING = tuple(f"aten::{name}" for name in ("empty_like", "zeros_like", "ones_like", "new_empty", "new_zeros"))
"""Operations that are given a tensor only for its shape and its kind."""
_DTENSOR = "DTensor"  # torch imports the class only where it is used
_FUNCTIONAL = "_c10d_functional"
"""How the names of the operations begin by which functional collectives, and compiled functions, communicate."""
_CALLS = "c10d"
"""The namespace of the operations by which groups make their calls: these come to `FirstUses.called` by themselves."""
_storage_of = torch.Tensor.untyped_storage


@dataclass
class _Open:
    """A call that was waited for, at once or later, and whose result nothing has used yet."""

    place: int
    nth: int
    """See `UsedNamed`."""
    calls: int = 0
    """Calls and waits of the script since."""
    scaled: tuple[str, int] = ("", 0)
    """File and line of the script that has multiplied the result by a number since; 0 for none."""


@dataclass
class _Use:
    """A first use in the gap before the next call."""

    place: int
    nth: int
    calls: int
    at: float
    file: str
    line: int
    scaled: tuple[str, int]


class FirstUses:
    """One watch of one thread. `script_frame` gives the innermost frame of the script; `say` takes what was found."""

    def __init__(
        self,
        clock: Callable[[], float],
        script_frame: Callable[[], FrameType | None],
        say: Callable[[UsedNamed | BuildsNamed | WaitsNamed | HiddenNamed], None],
    ) -> None:
        self._clock, self._script_frame, self._say = clock, script_frame, say
        self._operations = _Operations(self._touched, self._made)
        self._methods = Methods(torch.Tensor)
        self._thread = 0
        self._began = 0.0
        self._gap_began = 0.0
        self._started: dict[int, tuple[int, int, tuple[int, ...], float]] = {}
        self._waited = self._cpu_of_waits = 0.0
        self._open: dict[int, _Open] = {}  # by the address of the memory
        self._in_gap: list[_Use] = []
        self._seen: dict[int, int] = {}
        self._found: dict[tuple[int, int], UsedNamed] = {}
        self._steps = 0
        self._nth: dict[int, int] = {}  # place → its calls since the last step of an optimizer
        self._unknown: set[int] = set()
        self._calls = 0
        self._newest: dict[int, int] = {}  # memory → the number of the last call from which something in it comes
        self._pieces: dict[int, list[tuple[int, int]]] = {}
        """Memory that the last call was given → from where to where; not where an operation has changed it since."""
        self._hidden: set[str] = set()  # see `HiddenNamed`
        self._builds: dict[int, Counter[int]] = {}
        """Place → how many calls back the newest one is from which something comes that a call was given; 0: none."""
        self._first = 0  # number of the first of the calls that need no result of each other; 0: not known
        self._all_of = 0  # the place of all of them; -1 where they are of several
        self._ended: dict[int, Counter[int]] = {}
        """Place → how many such calls of it there were before one that needs a result of them."""

    def begin(self, now: float) -> bool:
        """Look at this thread's operations from here on; False where that cannot begin at this moment."""
        # The mode that has begun last ends first, and the script may end its own before this one.
        if _get_current_dispatch_mode() is not None or _in_backward():
            return False
        if not hasattr(TorchDispatchMode, "ignore_compile_internals") and _runs_compiled_functions():
            return False  # before torch 2.9 they would run as they were before compiling
        self._thread, self._began = threading.get_ident(), now
        self._operations.__enter__()  # type: ignore[no-untyped-call]
        for name in _PAST_THE_DISPATCHER:
            self._methods.replace(name, functools.partial(_telling, self._touched))
        return True

    def is_over(self, now: float) -> bool:
        """Whether enough was seen, and this is a moment at which it can be ended."""
        enough = now - self._began > _SHORTEST and min(self._seen.values(), default=0) >= _OFTEN
        a_loop = bool(self._ended) or now - self._began > _LONG
        enough = enough and (self._steps > _OFTEN if self._steps else a_loop)
        long = now - self._began > _LONGEST
        if not (enough or long) or threading.get_ident() != self._thread:
            return False
        return self._may_end

    @property
    def _may_end(self) -> bool:
        return _get_current_dispatch_mode() is self._operations and not _in_backward()

    def end(self) -> None:
        """Look at nothing any more, and say what was seen."""
        self.stop()
        for (place, nth), found in () if _runs_compiled_functions() else self._found.items():
            if place not in self._unknown and (nth < 0 or self._steps > _OFTEN):
                self._say(found)
        for place, backs in self._builds.items():
            if back := _built_on(backs, self._ended.get(place, Counter())):
                self._say(BuildsNamed(place, back))
        for what in sorted(self._hidden):
            self._say(HiddenNamed(what))
        if self._waited:
            self._say(WaitsNamed(min(1.0, self._cpu_of_waits / self._waited)))

    def stop(self) -> None:
        """Look at nothing any more, at any moment, and in a fork. A mode that has to stay hears of nothing."""
        self._methods.restore()
        self._open.clear()
        self._newest.clear()
        self._pieces.clear()
        self._calls = self._first = 0
        if threading.get_ident() == self._thread and self._may_end:
            self._operations.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def called(self, work: int, place: int, given: Any, began: float, returned: float) -> None:
        """The script has made a call from this place; `work` tells it apart until it was waited for."""
        if threading.get_ident() != self._thread:
            return
        self._gap_ends(began, returned)
        if not self._calls:  # the first operation that is looked at may take seconds: torch imports much for it
            self._began = began
        addresses = tuple(_addresses(given))
        # A line in a loop: what uses the last result of a step at once says nothing of those before it.
        nth = self._nth.get(place, 0) if self._steps else -1
        self._nth[place] = min(nth + 1, LAST_NTH)
        self._started[work] = (place, nth, addresses, time.thread_time())
        self._seen[place] = self._seen.get(place, 0) + 1
        pieces = [piece for piece in map(_piece, _tensors(given)) if piece is not None]
        back = min(filter(None, map(self._calls_back, pieces)), default=0)
        self._builds.setdefault(place, Counter())[back] += 1
        self._calls += 1
        if back and self._calls - back >= self._first:
            if self._first and place == self._all_of:
                self._ended.setdefault(place, Counter())[self._calls - self._first] += 1
            self._first, self._all_of = self._calls, place
        elif place != self._all_of:
            self._all_of = -1
        self._pieces.clear()
        for address, *piece in pieces:
            self._pieces.setdefault(address, []).append((piece[0], piece[1]))
        self._newest.update(dict.fromkeys(addresses, self._calls))

    def _calls_back(self, piece: tuple[int, int, int]) -> int:
        """How many calls back the newest one is from which something in this memory may come; 0 for none.

        What the last call was given may be another piece of one tensor.
        """
        address, begin, end = piece
        if not address or not (newest := self._newest.get(address, 0)):
            return 0
        given = self._pieces.get(address)
        is_another = given is not None and not any(begin < until and since < end for since, until in given)
        return 0 if newest == self._calls and is_another else self._calls - newest + 1

    def waited(self, work: int, began: float, ended: float, is_blocking: bool) -> None:
        """The end of a call was waited for, before its function returned if `is_blocking`."""
        started = self._started.pop(work, None)
        if started is None or threading.get_ident() != self._thread:
            return
        if is_blocking:
            self._waited += ended - began
            self._cpu_of_waits += time.thread_time() - started[3]
        else:
            self._gap_ends(began, ended)
        self._gap_began = ended
        place, nth, addresses, _ = started
        call = _Open(place, nth)
        self._open.update(dict.fromkeys(addresses, call))

    def stepped(self) -> None:
        """An optimizer has stepped."""
        if threading.get_ident() == self._thread:
            self._steps += 1
            self._nth.clear()

    def used(self, given: Any) -> None:
        """The script is about to use all tensors in there."""
        if threading.get_ident() == self._thread:
            self._touched(given)

    def _gap_ends(self, at: float, then: float) -> None:
        length = max(1e-9, at - self._gap_began)
        for use in self._in_gap:
            share = min(1.0, max(0.0, (use.at - self._gap_began) / length))
            for nth in {use.nth, -1}:
                at_line = (use.file, use.line, nth, use.scaled[1], use.scaled[0])
                named = UsedNamed(use.place, use.calls, share, *at_line)
                before = self._found.get((use.place, nth))
                if before is None or (named.calls, named.share) < (before.calls, before.share):
                    self._found[use.place, nth] = named
        self._in_gap.clear()
        for call in {id(one): one for one in self._open.values()}.values():
            call.calls += 1
            if call.calls > _MOST_BETWEEN:  # what uses it is not seen, or nothing does
                self._unknown.add(call.place)
                self._open = {address: one for address, one in self._open.items() if one is not call}
        self._gap_began = then

    def _touched(self, given: Any, types: Any = (), scales: bool = False) -> None:
        """An operation is given this. `types`: classes of tensors in there that do operations in their own way.

        `scales`: it only multiplies these tensors by a number, in place.
        """
        if not self._open:
            return
        try:
            is_hidden = any(not hasattr(one, "__tensor_flatten__") for one in types)
            if not is_hidden:
                self._uses(list(_addresses(given)), scales)
        except Exception:  # such a class may be the script's; or another thread reads a result at the same time
            is_hidden = True
        if is_hidden:  # nothing is promised of what they may hold
            hidden, self._open = self._open, {}
            self._unknown.update(call.place for call in list(hidden.values()))

    def _uses(self, addresses: list[int], scales: bool) -> None:
        for address in addresses:
            call = self._open.get(address)
            if call is None:
                continue
            frame = self._script_frame()
            file, line = (frame.f_code.co_filename, frame.f_lineno or 0) if frame is not None else ("", 0)
            if scales and line:
                call.scaled = file, line
                continue
            self._in_gap.append(_Use(call.place, call.nth, call.calls, self._clock(), file, line, call.scaled))
            self._open = {other: one for other, one in self._open.items() if one is not call}

    def _made(self, func: Any, given: Any, result: Any, types: Any) -> None:
        """Note that the result comes from what the operation was given; without a result, it has changed that."""
        if func.name().startswith(_FUNCTIONAL):
            self._hidden.add("functional collectives")
        if any(one.__name__ == _DTENSOR for one in types):
            self._hidden.add(_DTENSOR)
        if not self._calls or getattr(func, "namespace", "") == _CALLS:
            return
        try:
            (args, kwargs), name = given, func.name().partition(".")[0]
            read = (args[1:] if name in _OVERWRITES else args, kwargs)
            sources = () if name == _BRINGS_IN or name in _BRINGS_NOTHING else _addresses(read)
            newest = [self._newest.get(address, 0) for address in sources]
            changed = [*_addresses(given if result is None else result)]
            self._newest.update(dict.fromkeys(changed, max(newest, default=0)))
            if not getattr(func, "is_view", False):
                for address in changed:
                    self._pieces.pop(address, None)
        except Exception:  # such a tensor's class may be the script's: then nothing is known of it
            return


class _Operations(TorchDispatchMode):
    """Tells of the tensors that each operation is given."""

    supports_higher_order_operators = True  # such as flex_attention, which would raise in a mode that does not say so

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions run as they are: torch would leave them uncompiled in a mode that does not say so."""
        return True

    def __init__(self, touched: Callable[[Any, Any, bool], None], made: Callable[[Any, Any, Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell, self._tell_made = touched, made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not getattr(func, "is_view", False):
            self._tell((args, kwargs), types, _scales(func, args))
        result = func(*args, **(kwargs or {}))
        self._tell_made(func, (args, kwargs), result, types)
        return result


def _built_on(backs: Counter[int], ended: Counter[int]) -> int:
    """See `BuildsNamed.back`, by the counts of one place; 0 where its calls need no result of those before them.

    In a loop over gradients each call needs that of the last one in the step before: of the first that is one call
    back, of the second two. So that differs, and how many calls lie between two that need a later result tells it.
    """
    back, often = backs.most_common(1)[0]
    if often <= _CLEARLY * backs.total() and ended:
        calls, times = ended.most_common(1)[0]
        if 2 * times > ended.total():
            return calls
    return back if 2 * often > backs.total() else 0


def _scales(func: Any, args: Any) -> bool:
    return func.name().partition(".")[0] in _SCALES and len(args) > 1 and isinstance(args[1], (int, float))


def _in_backward() -> bool:
    """Whether a backward pass calls this. Behind each of its functions torch brings back the modes from before it."""
    return torch._C._current_graph_task_id() != -1


def _runs_compiled_functions() -> bool:
    """Whether torch has compiled a function in this process, by torch's own count."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["frames"]["ok"] > 0


def _telling(tell: Callable[[Any], None], original: Any) -> Any:
    """The method of tensors, which tells first that it reads one."""

    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        tell(self)
        return original(self, *args, **kwargs)

    return functools.update_wrapper(method, original)


def _addresses(given: Any) -> Iterator[int]:
    """The memory of each tensor in there."""
    for tensor in _tensors(given):
        if (address := _address(tensor)) is not None:
            yield address


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    """Each tensor in there, and those that a tensor of another class holds, such as `DTensor`."""
    if isinstance(given, torch.Tensor):
        if hasattr(type(given), "__tensor_flatten__"):
            for name in given.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
                yield from _tensors(getattr(given, name))
            return
        yield given
    elif isinstance(given, (list, tuple)):
        for one in given:
            yield from _tensors(one)
    elif isinstance(given, dict):
        yield from _tensors(tuple(given.values()))


def _address(tensor: torch.Tensor) -> int | None:
    try:
        with torch._C.DisableTorchFunctionSubclass():  # a class of the script's is not asked
            return _storage_of(tensor).data_ptr()
    except (RuntimeError, NotImplementedError):  # it has none of its own
        return None


def _piece(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """The memory of a tensor, and from where to where in there it lies, in bytes."""
    if (address := _address(tensor)) is None:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        width, begin = tensor.itemsize, tensor.storage_offset()
        last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return address, int(begin * width), int((begin + last + 1) * width)
