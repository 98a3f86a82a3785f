"""Notes each collective of this process in a file, for `autoddp diagnose`: where in the script, which group, how long.

    collectives.record(CallRecorder(RecordingPlan("/run/of/the/diagnosis"), is_launched=True))

A call is noted after the backend has taken it and is at work. What is noted are numbers in memory that is shared with
the file (`wire.recorded_calls`), which takes 3 to 16 µs (docs/diagnose.md): no thread, no exit hook, and nothing is
lost when the process is killed. Names are looked up when a place is seen for the first time. A fork of the process has
a file of its own.

The place of a call is the first frame outside of torch, of Python's own library and of autoddp. Nothing of the script
is kept alive but code objects: no frame, no tensor, no group and no `Work`.
"""

from __future__ import annotations

import itertools
import mmap
import os
import socket
import struct
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

from autoddp import codec
from autoddp.cpus import usable_cpus
from autoddp.log import get_logger
from autoddp.topology.nccl.interface_names import GLOO, NCCL
from autoddp.wire.recorded_calls import (
    CALLS,
    CALLS_FROM,
    OF_A_CALL,
    OF_A_PLACE,
    OF_SPARSE,
    PLACES,
    PLACES_FROM,
    SHORT_GAP,
    TRIAL,
    WATCH,
    GroupEventNamed,
    GroupNamed,
    Header,
    Named,
    PlaceNamed,
    ProcessNamed,
    RecordingPlan,
    ThreadsTrial,
    WorldNamed,
    add_name,
    made_file,
)
from autoddp.worker.observe import collectives
from autoddp.worker.observe.first_uses import FirstUses
from autoddp.worker.observe.kernel_accounts import CoreWaits, pauses, waited_for_cpu

logger = get_logger(__name__)

_FIRST_LOOKS = 0.1  # seconds between the first two looks at the process as a whole; a script may end within a second
_LOOKS = 1.0  # seconds between later ones, at most: a look takes a millisecond or two
_RARELY = 100.0  # times as long as a look took, at least: a process may have hundreds of threads
_FIRST_PERIODS = 3  # from one look to the next, in which each gap between calls is looked at: a script may be short
_PERIODS = 8  # later each gap is looked at in one of so many
_WAITED_FOR = 4_096  # calls whose end something may still wait for; a script that waits for none must not fill memory
_address: Callable[[object], int] = object.__hash__
"""A number that no two objects have at one time. `id` would give one too, but each call of it is an audit event, for
which the hook of the isolation runs; so is each look at a frame or at its code."""
_NUMBERS, _COUNT, _WAIT = struct.Struct("11d"), struct.Struct("d"), struct.Struct("3d")
_CALLS_AT, _BYTES_OF_A_CALL = 8 * CALLS_FROM, 8 * OF_A_CALL
_RETURNED_AT, _WAIT_AT, _CPU_WAITED_AT = 8 * 4, 8 * 5, 8 * 9
_GIVEN_ONE = ("allreduce", "broadcast", "reduce", "send", "recv", "recv_anysource")
"""Methods that are given one list of tensors, which they read and write. What is not named here is only slower."""
_NOT_THE_SCRIPT = tuple(
    os.path.join(os.path.dirname(os.path.abspath(path)), "")
    for path in (torch.__file__, os.path.dirname(os.path.dirname(__file__)), os.__file__)
)
_INSTALLED = ("site-packages", "dist-packages")
_DEPRECATES = getattr(sys.modules.get("typing_extensions"), "__file__", "")
"""File of the decorator `deprecated`, which torch puts around functions that it has renamed."""
_TORCH, _AUTODDP = _NOT_THE_SCRIPT[:2]
_C10D = dist.distributed_c10d.__file__
_PATCHES = collectives.__file__
"""File of the functions that stand around those of torch, called by the script."""
_DECORATORS = dist.c10d_logger.__file__
"""File in which the decorators of the functions of torch.distributed are."""
_STAND_FOR_C10D = (_C10D, _DECORATORS, os.path.join(_TORCH, "autograd", "function.py"))
"""Files of torch with functions that a script calls for one collective, and that of `apply`. Through those of
`torch.distributed.nn.functional` gradients pass, so no call of another function does what they do."""
_ENGINE = os.path.join(_TORCH, "autograd", "")
_WITH_ROOT = ("broadcast", "reduce", "gather", "scatter")
"""Methods with a rank that sends to the others, or collects. The options, which come last, have it."""
_ONE_TO_ONE = ("send", "recv", "_end_coalescing")
"""How the names of methods begin in which not all ranks of the group take part. NCCL ends each batch of sends and
receives by `_end_coalescing`: the ranks of a pipeline have more or fewer of them."""


@dataclass(slots=True)
class _Group:
    """A group that has been seen. `calls`: those in which all of its ranks take part."""

    number: int
    name: str
    ranks: tuple[int, ...]
    calls: int = 0


@dataclass(slots=True)
class _Place:
    """A place that has been seen, with its sums so far."""

    number: float
    group: _Group | None
    counted: _Group | None
    """The group, if all of its ranks take part in calls from here."""
    gives_one: bool
    """Whether the call is given a list of one tensor, and nothing else that holds tensors."""
    count: int = 0
    bytes: int = 0
    in_calls: float = 0.0
    in_waits: float = 0.0


class CallRecorder:
    """Implements `collectives.Recorder`. A fault of its own ends the recording, and never reaches the script."""

    def __init__(self, plan: RecordingPlan, is_launched: bool) -> None:
        self.on = True
        self._plan, self._is_launched = plan, is_launched
        self._paused_at = self._paused = 0.0
        self._may_try = True
        self._watch: FirstUses | None = None
        self._core_waits = CoreWaits()
        self._opening = threading.RLock()
        self._codes: dict[int, tuple[CodeType, bool]] = {}
        self._depths: dict[int, int] = {}
        self._groups: dict[int, _Group] = {}
        self._of_name: dict[tuple[str, tuple[int, ...]], _Group] = {}
        self._all: list[_Place] = []
        self._places: dict[tuple[Any, ...], _Place] = {}
        self._parts: dict[tuple[Any, ...], int] = {}
        self._optimizers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._free: list[int] = []
        self._pending: dict[int, tuple[int, _Place, CodeType]] = {}
        self._forget()
        os.register_at_fork(after_in_child=self._forked)

    def _forget(self) -> None:
        for known in (self._groups, self._of_name, self._all, self._places, self._parts, self._pending):
            known.clear()  # the functions that note calls know these objects
        self._shared: mmap.mmap | None = None
        self._made = itertools.count()
        self._group_events = 0
        self._world: tuple[int, int, int, str] | None = None
        self._look_after, self._looks = 0.0, _FIRST_LOOKS
        self._opened = 0.0
        self._looked: list[tuple[float, ...]] = []
        self._thread = self._threads_before = 0
        self._threads: dict[int, int] = {}
        self._back = 0.0
        self.begins: Callable[[], None] | None = None
        self._looks_made = 0
        self._is_tried = False
        self._trial: ThreadsTrial | None = None
        self._watch = None
        self._knows_watch = self._wants_watch = False

    def _forked(self) -> None:
        self._is_launched = False
        self._core_waits = CoreWaits()  # the file of the one before has the account of the parent's thread
        self._opening = threading.RLock()
        if self._watch is not None:
            self._watch.stop()
        self._forget()

    # Called from the patched functions

    def noting(self, method: str) -> Callable[[Any, Any, Any, float, float], None]:
        """See `Recorder`. It must be called by the patched method itself: frames are counted from there.

        The functions of torch.distributed are torch's frames, most of them with a decorator's frame around them. How
        many of them there are is known for each function, so the frame behind them is the place, if it is none of
        torch's. Else all frames are looked at one by one.
        """
        address = _address
        frame, depths, places, pending = sys._getframe, self._depths, self._places, self._pending
        pack, counts = _NUMBERS.pack_into, not method.startswith(_ONE_TO_ONE)
        has_root = method in _WITH_ROOT
        is_scatter = method == "scatter"  # its root gives as much as all get: what a rank gets is told
        thread_time, this_thread = time.thread_time, threading.get_ident

        def note(group: Any, args: Any, work: Any, began: float, returned: float) -> None:
            try:
                caller = script = frame(2)
                direct = caller.f_code
                if inside := depths.get(address(direct), 0):
                    for _ in range(inside):  # they were there the first time, but C++ may call the function too
                        script = script.f_back or script
                    code = script.f_code
                else:
                    code = direct
                place = places.get((address(group), address(code), script.f_lasti, method))
                if place is None:
                    place = self._place(method, group, args, caller, counts)
                shared = self._shared
                assert shared is not None
                is_known = began - self._back > SHORT_GAP and this_thread() == self._thread
                cpu = thread_time() if is_known else 0.0  # that takes longer than all the rest
                self._back = returned
                number, counted = -1, place.counted
                if counted is not None:
                    number = counted.calls
                    counted.calls = number + 1
                try:
                    size = args[0][0].nbytes if place.gives_one else _bytes(args[:1] if is_scatter else args)
                except RuntimeError:  # a sparse tensor has no bytes of its own
                    place, size = self._place(f"{method}{OF_SPARSE}", group, args, caller, counts), 0
                root = getattr(args[-1], "rootRank", -1) if has_root else -1
                made = next(self._made)
                at = _CALLS_AT + made % CALLS * _BYTES_OF_A_CALL
                if work is None:
                    pack(shared, at, place.number, number, size, began, returned, returned, returned, 1, cpu, 0, root)
                    if self.begins is not None:
                        self._core_waits.ends(is_blocking=True)
                else:
                    pack(shared, at, place.number, number, size, began, returned, 0, 0, 0, cpu, 0, root)
                    pending[address(work)] = (at, place, direct)
                _COUNT.pack_into(shared, 0, made + 1)
                place.count += 1
                place.bytes += size
                place.in_calls += returned - began
                if self._watch is not None:
                    self._watch.called(address(work), int(place.number), args, began, returned)
                if returned > self._look_after:
                    self._look(returned)
            except Exception as error:
                self._fail(error)

        return note

    def wait_begins(self) -> None:
        """See `Recorder`."""
        self._core_waits.wait_begins()

    def waited(self, work: Any, began: float, ended: float) -> None:
        """See `Recorder`. It must be called by the patched method itself."""
        found = self._pending.pop(_address(work), None)
        shared = self._shared
        if found is None or shared is None:
            return
        at, place, direct = found
        try:
            # torch's function that has asked for the call waits for it, as `send` for that of `isend`: the script could
            # not go on. Only the manager of coalesced calls has a `wait` in that file, which the script calls itself.
            code = sys._getframe(2).f_code
            is_blocking = code is direct and code.co_filename.startswith(_TORCH)
            is_blocking = is_blocking or (code.co_filename == _C10D and code.co_name != "wait")
            _WAIT.pack_into(shared, at + _WAIT_AT, began, ended, is_blocking)
            if not is_blocking:  # else it has computed next to nothing since the call has returned
                _COUNT.pack_into(shared, at + _CPU_WAITED_AT, self._cpu())
            # torch waits at once: a core that is lost in between is lost to the call, as in `Call.seconds`.
            since = _COUNT.unpack_from(shared, at + _RETURNED_AT)[0] if is_blocking else began
            place.in_waits += ended - since
            self._back = ended
            if self.begins is not None:
                self._core_waits.ends(is_blocking)
            if self._watch is not None:
                self._watch.waited(_address(work), began, ended, is_blocking)
                self._begin_or_end_watch(ended)
            elif self._wants_watch:
                self._begin_or_end_watch(ended)
        except Exception as error:
            self._fail(error)

    def _begin_or_end_watch(self, now: float) -> None:
        """Look where results are first used, or end it, where that can be done at this moment: see `FirstUses`."""
        if self._watch is not None:
            if self._watch.is_over(now):
                watch, self._watch = self._watch, None
                watch.end()
        elif self._wants_watch:
            watch = FirstUses(time.perf_counter, self._script_frame, self._say)
            if watch.begin(now):
                self._watch, self._wants_watch = watch, False

    def made(self, what: str, group: Any, began: float, cpu: float, ended: float) -> None:
        """See `Recorder`. It must be called by the patched function itself."""
        try:
            known = self._groups.get(_address(group))
            name, ranks = (known.name, known.ranks) if known is not None else _name_and_ranks(group)
            self._forget_group(group)
            self._event(what, began, cpu, ended, sys._getframe(2), number=self._group_events)
            self._say(GroupEventNamed(self._group_events, name, ranks))
            self._group_events += 1
        except Exception as error:
            self._fail(error)

    def pickled(self, what: str, began: float, cpu: float, ended: float) -> None:
        """See `Recorder`. It must be called by the patched function itself."""
        try:
            self._event(what, began, cpu, ended, sys._getframe(2))
            self._back = ended
        except Exception as error:
            self._fail(error)

    def _forget_group(self, group: Any) -> None:
        """Forget what is known by the memory of a group, or of all: a new one may have that of a destroyed one."""
        if group is None:
            self._groups.clear()
            self._places.clear()
            self._parts.clear()
            return
        if self._groups.pop(_address(group), None) is None:
            return
        for known in (self._places, self._parts):
            for key in [key for key in known if key[0] == _address(group)]:
                del known[key]

    def steps(self, optimizer: Any, *_: Any) -> None:
        """An optimizer is about to step: for `register_optimizer_step_pre_hook`.

        It uses its parameters and gradients, also where its C++ code reads them past torch's dispatcher.
        """
        watch = self._watch
        if watch is not None and self.on:
            try:
                watch.used([one for group in optimizer.param_groups for p in group["params"] for one in (p, p.grad)])
            except Exception as error:
                self._fail(error)

    def stepped(self, optimizer: Any, *_: Any) -> None:
        """An optimizer has stepped: for `register_optimizer_step_post_hook`."""
        if self.on:
            try:
                now, cpu = time.perf_counter(), time.thread_time()
                if self._watch is not None:
                    self._watch.stepped()
                number = self._number_of(optimizer)
                self._event(f"step of {type(optimizer).__name__}", now, cpu, now, sys._getframe(1), number)
            except Exception as error:
                self._fail(error)

    def _number_of(self, optimizer: Any) -> int:
        """A number that no other optimizer has while this one lives.

        One that is made in the place of another, as in each round of federated training, gets the number that is free
        by then, and so it is the same optimizer. By its memory it would be another one in each round.
        """
        known = self._optimizers.get(_address(optimizer))
        if known is not None and known[0]() is optimizer:
            return known[1]
        gone = [at for at, (one, _) in list(self._optimizers.items()) if one() is None]
        # The smallest first: then each of several that are made anew together gets its own number again.
        self._free = sorted([*self._free, *(self._optimizers.pop(at)[1] for at in gone)])
        number = self._free.pop(0) if self._free else len(self._optimizers)
        self._optimizers[_address(optimizer)] = weakref.ref(optimizer), number
        return number

    def _event(
        self, what: str, began: float, cpu: float, ended: float, caller: FrameType, of: int = 0, number: int = -1
    ) -> None:
        """Something that is no call of a group: one that returns at once, and all of it is a wait."""
        place = self._place(what, None, (), caller, counts=False, of=of)
        shared = self._shared
        assert shared is not None
        made = next(self._made)
        at = _CALLS_AT + made % CALLS * _BYTES_OF_A_CALL
        behind = self._cpu()
        cpu = cpu if behind else 0.0
        _NUMBERS.pack_into(shared, at, place.number, number, 0, began, began, began, ended, 1, cpu, behind, -1)
        _COUNT.pack_into(shared, 0, made + 1)
        place.count += 1
        place.in_calls += ended - began
        if ended > self._look_after:
            self._look(ended)
        self._begin_or_end_watch(ended)

    # Pauses

    def begin_anew(self) -> None:
        """Forget the calls so far: those that come are noted in another file. Nothing is tried any more."""
        self._end_trials()
        self._forget()
        self._paused, self._may_try = 0.0, False

    def _end_trials(self) -> None:
        """Let the script run as it is written, from here on: nobody would end later what is tried in it."""
        if self._watch is not None:
            self._watch.stop()
        self._watch, self._wants_watch = None, False
        if self._threads_before and threading.get_ident() == self._thread:
            torch.set_num_threads(self._threads_before)
            self._threads_before = 0

    def pause(self) -> None:
        """Note nothing until `resume`."""
        if self.on:
            self.on, self._paused_at = False, time.perf_counter()

    def resume(self) -> None:
        """Note calls again."""
        if not self.on and self._paused_at:
            self.on = True
            self._paused += time.perf_counter() - self._paused_at
            if self._shared is not None:
                self._set(Header.PAUSED, self._paused)

    def _fail(self, error: Exception) -> None:
        self.on, self._paused_at = False, 0.0
        self._end_trials()
        logger.warning("the script's collectives are no longer recorded: %r", error)

    # The files

    def _set(self, index: int, *values: float) -> None:
        """Write numbers of the file."""
        assert self._shared is not None
        struct.pack_into(f"{len(values)}d", self._shared, 8 * index, *values)

    def _is_the_scripts(self, code: CodeType) -> bool:
        known = self._codes.get(_address(code))
        if known is None:
            # A code object that is kept keeps its address, so that no other one is taken for it.
            known = self._codes[_address(code)] = (code, _is_the_scripts(code.co_filename))
        return known[1]

    def _script_frame(self) -> FrameType | None:
        """The innermost frame of the script of who calls this."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not self._is_the_scripts(frame.f_code):
            frame = frame.f_back
        return frame

    def _place(self, method: str, group: Any, args: Any, caller: FrameType, counts: bool, of: int = 0) -> _Place:
        """The place from which a call comes, by a look at each frame. `of` tells apart what is no group."""
        inside, frame = [], caller
        while not self._is_the_scripts(frame.f_code) and frame.f_back is not None:
            inside.append(frame)
            frame = frame.f_back
        if any(one.f_code.co_filename.startswith(_AUTODDP) and one.f_code.co_filename != _PATCHES for one in inside):
            group = None  # a hook of ours, or an experiment: no call of the script's
        whose, code = of if group is None else _address(group), frame.f_code
        key: tuple[Any, ...] = (whose, _address(code), frame.f_lasti, method)
        if len(inside) > 1 + (len(inside) > 1 and inside[1].f_code.co_filename == _DECORATORS):
            key = (*key, *(one.f_lasti for one in inside))
        elif inside and self._is_the_scripts(frame.f_code):
            self._depths[_address(inside[0].f_code)] = len(inside)
        return self._places.get(key) or self._new_place(key, method, group, args, caller, frame, counts)

    def _new_place(
        self,
        key: tuple[Any, ...],
        method: str,
        group: Any,
        args: Any,
        caller: FrameType,
        frame: FrameType,
        counts: bool,
    ) -> _Place:
        with self._opening:
            if self._shared is None:
                self._open()
            of = self._group(group) if group is not None else None
            number = min(len(self._all), PLACES - 1)
            one = len(args) > 0 and type(args[0]) is list and len(args[0]) == 1 and method in _GIVEN_ONE
            place = self._places[key] = _Place(number, of, of if counts else None, one)
            self._all.append(place)
            if len(self._all) <= PLACES:
                self._say(self._named(place, method, args, caller, frame, key))
            return place

    def _named(
        self, place: _Place, method: str, args: Any, caller: FrameType, frame: FrameType, key: tuple[Any, ...]
    ) -> PlaceNamed:
        called, inner, by, within = method, caller, "", ""
        while inner is not frame:
            file = inner.f_code.co_filename
            if file == _C10D and not inner.f_code.co_name.startswith("_"):
                called = inner.f_code.co_name
            elif not by and file.startswith(_TORCH) and file not in _STAND_FOR_C10D:
                # Of a backward pass it is the function in there: the line only starts it.
                by = (within if file.startswith(_ENGINE) else file).removeprefix(_TORCH)
            within = within if file.startswith(_ENGINE) else file
            assert inner.f_back is not None
            inner = inner.f_back
        tensor = next(_tensors(args), None)
        # Parts of one call are told apart in the order in which they are first seen; and so are optimizers that step in
        # one line, because each of them ends a step.
        whole = (0 if place.group is None else key[0], *key[1:3], called)
        part = self._parts[whole] = self._parts.get(whole, -1) + 1
        return PlaceNamed(
            place=int(place.number),
            file=frame.f_code.co_filename,
            line=frame.f_lineno or 0,
            function=frame.f_code.co_name,
            collective=f"sparse {called.removesuffix(OF_SPARSE)}" if method.endswith(OF_SPARSE) else called,
            method=method,
            part=part,
            group=-1 if place.group is None else place.group.number,
            device="" if tensor is None else tensor.device.type,
            dtype="" if tensor is None else str(tensor.dtype).removeprefix("torch."),
            reduction=_reduction(args),
            by=by,
            thread=self._number_of_thread(),
        )

    def _number_of_thread(self) -> int:
        """See `PlaceNamed.thread`. `threading.current_thread()` would put threads that are not Python's on its list."""
        this = threading.get_ident()
        own = (one.ident for one in threading.enumerate() if not isinstance(one, threading._DummyThread))
        return self._threads.setdefault(this, len(self._threads)) if this in own else -1

    def _group(self, group: Any) -> _Group:
        known = self._groups.get(_address(group))
        if known is None:
            name, ranks = _name_and_ranks(group)
            known = self._of_name.get((name, ranks))
            if known is None:
                known = self._of_name[name, ranks] = _Group(len(self._of_name), name, ranks)
                self._say_world()
                self._say(GroupNamed(known.number, name, ranks, _backend(group)))
            self._groups[_address(group)] = known
        return known

    def _say_world(self) -> None:
        if dist.is_initialized():
            world = (dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), self._interface())
            if world != self._world:
                self._world = world
                self._say(WorldNamed(*world))

    def _interface(self) -> str:
        """The value of the backend's variable for interfaces (GLOO_SOCKET_IFNAME or NCCL's); "" where it is not set."""
        return os.environ.get(NCCL if "nccl" in _backend(None) else GLOO, "")

    def _open(self) -> None:
        name = os.path.join(self._plan.folder, f"{os.getpid()}-{time.monotonic_ns()}")
        self._thread = threading.get_ident()
        if self._core_waits.thread != self._thread:
            self._core_waits = CoreWaits()
        self._shared = made_file(f"{name}.calls")
        self._opened, self._paused = time.perf_counter(), 0.0  # a pause before the first call is no part of it
        self._set(Header.BEGAN, self._opened)
        rank = os.environ.get("RANK", "")
        self._say(
            ProcessNamed(
                pid=os.getpid(),
                parent=os.getppid(),
                is_launched=self._is_launched,
                launched_rank=int(rank) if rank.isdecimal() else None,
                host=socket.gethostname(),
                cores=usable_cpus(),
            )
        )
        self._note_look()

    def _say(self, named: Named) -> None:
        assert self._shared is not None
        with self._opening:  # two threads may have something to say
            add_name(self._shared, named)

    def _look(self, now: float) -> None:
        """Write what is known of the process as a whole: sums of places, and the kernel's accounts."""
        began = time.thread_time()
        self._note_look()
        took = time.thread_time() - began
        self._looks_made += 1
        for place in self._all[:PLACES]:
            at = PLACES_FROM + int(place.number) * OF_A_PLACE
            self._set(at, place.count, place.bytes, place.in_calls, place.in_waits)
        if len(self._pending) > _WAITED_FOR:
            self._pending.clear()
        self._look_after = now + max(self._looks, _RARELY * took)
        if self._may_try:
            self._look_for_trials(now)
        self._look_at_gaps(now)
        self._looks = min(2 * self._looks, _LOOKS)

    def _look_at_gaps(self, now: float) -> None:
        """Decide whether each gap is looked at until the next look.

        None is while fewer threads are tried: with these the ranks wait for a core less than as written. Those right
        behind the trial are.
        """
        trial, was_tried = self._trial, self._is_tried
        self._is_tried = trial is not None and trial.begins <= now < trial.ends
        is_later = self._looks_made % _PERIODS == 0 or was_tried
        if is_later and not self._is_tried:  # what a script does before its steps is no part of them
            self._core_waits.forget()
        self._core_waits.pass_over()
        looks = not self._is_tried and (is_later or self._looks_made <= _FIRST_PERIODS)
        self.begins = self._core_waits.begins if looks else None

    def _look_for_trials(self, now: float) -> None:
        """Do what the launcher wants to be tried in the processes of a script without DDP."""
        if not self._knows_watch and os.path.exists(os.path.join(self._plan.folder, WATCH)):
            self._knows_watch = self._wants_watch = True
        if self._trial is None and os.path.exists(trial := os.path.join(self._plan.folder, TRIAL)):
            with open(trial, encoding="utf-8") as file:
                self._trial = codec.decode(file.read(), ThreadsTrial)
        # A rank that was long away from its calls, in an evaluation, has yet to leave its last turn.
        in_a_turn = self._threads_before and threading.get_ident() == self._thread
        if self._trial is not None and (in_a_turn or now < self._trial.ends + _LOOKS):
            self._take_turn(self._trial, now)

    def _take_turn(self, trial: ThreadsTrial, now: float) -> None:
        """Give this process the threads of the present turn. They are those of a thread, so only the first one does."""
        turn = trial.turn_at(now)
        if turn < trial.turns:  # behind the last one that moment is over: each call would be followed by a look
            self._look_after = min(self._look_after, trial.begins + (turn + 1) * trial.turn)
        if threading.get_ident() != self._thread or trial.has_fewer(turn) == bool(self._threads_before):
            return
        if self._threads_before:
            torch.set_num_threads(self._threads_before)
            self._threads_before = 0
        else:
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(trial.threads)

    def _note_look(self) -> None:
        if threading.get_ident() != self._thread:  # the accounts of two threads cannot be compared
            return
        waited = waited_for_cpu()
        now = time.perf_counter()
        self._looked.append((now, time.thread_time(), time.process_time(), waited.trains, waited.helpers, pauses()))
        # What a script does before its steps is no part of them, and may be a long wait.
        third = self._opened + (now - self._opened) / 3
        while len(self._looked) > 1 and self._looked[1][0] <= third:
            del self._looked[0]
        self._set(Header.FIRST_LOOK, *self._looked[0])
        self._set(Header.LAST_LOOK, *self._looked[-1])
        self._set(Header.WAITED_IN_GAPS, self._core_waits.waited, self._core_waits.seconds)

    def _cpu(self) -> float:
        """CPU time of this thread; 0 in another one than the first, because two of them cannot be compared."""
        return time.thread_time() if threading.get_ident() == self._thread else 0.0


def _is_the_scripts(file: str) -> bool:
    """Whether code in this file is neither torch's, nor autoddp's, nor Python's own."""
    if file.startswith("<frozen "):
        return False
    if file.startswith(_NOT_THE_SCRIPT[:2]) or file == _DEPRECATES:
        return False
    is_installed = any(f"{os.sep}{name}{os.sep}" in file for name in _INSTALLED)
    return is_installed or not file.startswith((_NOT_THE_SCRIPT[2], sysconfig.get_path("stdlib") + os.sep))


def _bytes(args: Any) -> int:
    """Bytes that this rank gives to a call: those of its input, which stands behind the output where there are two."""
    try:
        first = args[0]
        if type(first) is list and len(first) == 1 and len(args) < 3:  # the usual case: a list of one tensor
            second = args[1] if len(args) == 2 else None
            if not isinstance(second, (list, torch.Tensor)):
                return int(first[0].nbytes)
    except (IndexError, AttributeError, RuntimeError):  # a barrier; a list of lists; a tensor without storage
        pass
    found = [total for total in (_total(one) for one in args[:2] if isinstance(one, (list, torch.Tensor))) if total]
    return found[-1] if found else 0


def _reduction(args: Any) -> str:
    """How a call reduces, as its options say, which come last; "" where it does not."""
    operation = getattr(args[-1], "reduceOp", None) if args else None
    return "" if operation is None else str(getattr(operation, "op", operation))


def _total(given: Any) -> int:
    try:
        return sum(int(tensor.nbytes) for tensor in _tensors((given,)))
    except RuntimeError:  # a sparse tensor has no bytes of its own
        return 0


def _tensors(args: Any) -> Any:
    for one in args:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _tensors(one)


def _name_and_ranks(group: Any) -> tuple[str, tuple[int, ...]]:
    """torch's name of a group, and its ranks. A group that the script has made by itself is not in torch's tables."""
    if not isinstance(group, dist.ProcessGroup):
        return "", ()  # this rank is none of its ranks, or it is all groups
    try:
        return str(group.group_name), tuple(dist.get_process_group_ranks(group))
    except (KeyError, RuntimeError, ValueError, AttributeError):
        return f"made by hand, {group.size()} ranks", tuple(range(group.size()))


def _backend(group: Any) -> str:
    try:
        return str(dist.get_backend(group))
    except (KeyError, RuntimeError, ValueError, AssertionError, TypeError):  # the last one of torch 2.6
        return str(getattr(group, "name", lambda: "")())
