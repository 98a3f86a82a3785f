"""Whether what runs on streams waits for what it needs, on a CPU: torch's sanitizer, and streams that are not there.

    cuda = OrderedCuda()
    cuda.install(monkeypatch)        # from here on autoddp takes the CPU for a GPU
    with cuda.watching():
        …                            # each operator of torch is a kernel on the current stream
    assert cuda.races == []

Two kernels that use the same memory, one of which writes, are a race unless something orders their streams. Memory may
also be freed too early: while its use on another stream may still be queued, torch's allocator gives it to whatever
comes next on the stream on which it was taken.

`FakeNccl` is a process group whose collectives run on a stream of their own. As with NCCL of torch 2.8 and newer, a
work holds its tensors until somebody waits for it or a thread of NCCL's looks again, and its future is done as soon as
the work is queued. This is the only file that uses the sanitizer, which has no public names.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_cuda import Event, FakeCuda, Stream
from python_group import Call, PythonGroup, perform
from torch.cuda._sanitizer import FACTORY_FUNCTION_REGEX, ArgumentHandler, EventHandler, UnsynchronizedAccessError
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoddp.worker.ddp.backward import after_backward_computed
from autoddp.worker.hooks import Hook, scaling
from autoddp.worker.hooks.bucket import GradBucket
from autoddp.worker.process import device as device_module

_POWERSGD = importlib.import_module("autoddp.worker.hooks.powersgd")  # `hooks` has a function of that name
_HOST_READS = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero")
"""Operators whose result the host waits for."""


@dataclass
class _Memory:
    """What one storage is used for."""

    taken_on: int
    """The stream on which it was allocated."""
    uses: dict[int, int] = field(default_factory=dict)
    """Stream → number of the last kernel on it that used this memory."""
    told: set[int] = field(default_factory=set)
    """Streams of which the allocator was told, by `record_stream`."""


class _Accesses(ArgumentHandler):
    """The storages that an operator reads and writes. torch's own sees CUDA tensors alone, and not parts of one."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}

    def _handle_argument(
        self,
        value: Any,
        is_write: bool,
        metadata_only: bool,
        name: str | None = None,
        is_output: bool = False,
    ) -> None:
        if not isinstance(value, torch.Tensor) or not value.untyped_storage().nbytes():
            return
        storage = value.untyped_storage()
        place = storage.data_ptr()
        self.storages[place] = storage
        if is_write:
            self.dataptrs_written.add(place)
        elif not metadata_only:
            self.dataptrs_read.add(place)
        self.tensor_aliases.setdefault(place, []).append(name or "result")
        if is_output:
            self.outputs.add(place)


class _Kernels(TorchDispatchMode):
    """Takes each operator for a kernel on the current stream."""

    def __init__(self, cuda: OrderedCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_factory = bool(FACTORY_FUNCTION_REGEX.match(func._schema.name))
        accesses = _Accesses()
        accesses.parse_inputs(func._schema, args, kwargs, is_factory=is_factory)
        outputs = func(*args, **kwargs)
        accesses.parse_outputs(func._schema, outputs, is_factory=is_factory)
        self._cuda.launched(func._schema.name, accesses)
        return outputs


class _OrderedEvent(Event):
    def elapsed_time(self, later: Event) -> float:
        cuda: Any = self._cuda
        if not (cuda.has_waited_for(self) and cuda.has_waited_for(later)):
            raise RuntimeError("CUDA error: device not ready")  # as torch says it
        return super().elapsed_time(later)


class OrderedCuda(FakeCuda):
    def __init__(self) -> None:
        super().__init__()
        self.races: list[str] = []
        """Each pair of kernels that nothing orders, and each memory that is freed too early."""
        self._handler = EventHandler()
        self._numbers: dict[int, int] = {}
        self._alive: list[Stream] = []
        self._count = itertools.count()
        self._memory: dict[int, _Memory] = {}
        self._watches = False
        for stream in self.streams.values():
            self._number_of(stream)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let autoddp take the CPU for a GPU."""
        super().install(monkeypatch)
        monkeypatch.setattr(device_module, "GPU_TYPES", ["cuda", "cpu"])
        monkeypatch.setattr(scaling, "can_send_again", lambda device: False)
        monkeypatch.setattr(_POWERSGD, "future_on", lambda device: StreamFuture(self))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, 2**40))
        cuda, to_list, empty_like = self, torch.Tensor.tolist, torch.empty_like

        def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
            cuda.tell_allocator(tensor, stream)

        def as_list(tensor: torch.Tensor) -> Any:
            cuda.host_reads(tensor)
            return to_list(tensor)

        def not_pinned(like: torch.Tensor, pin_memory: bool = False, **others: Any) -> torch.Tensor:
            return empty_like(like, **others)

        monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
        monkeypatch.setattr(torch.Tensor, "tolist", as_list)  # reads a CPU's memory without an operator
        monkeypatch.setattr(torch, "empty_like", not_pinned)
        _forget_streams()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with _Kernels(self):
            self._watches = True
            try:
                yield
            finally:
                self._watches = False
                _forget_streams()

    def launched(self, operator: str, accesses: _Accesses) -> None:
        """A kernel is queued on the current stream."""
        stream = self._number_of(self.current_stream())
        for place, storage in accesses.storages.items():
            if place not in self._memory:
                taken_on = stream if place in accesses.outputs else 0
                self._memory[place] = _Memory(taken_on)
                weakref.finalize(storage, self._freed, place)
        written = accesses.dataptrs_written
        errors = self._handler._handle_kernel_launch(
            stream, accesses.dataptrs_read - written, written, accesses.outputs, operator, accesses.tensor_aliases
        )
        self.races += [_in_words(error) for error in errors if isinstance(error, UnsynchronizedAccessError)]
        for place in accesses.dataptrs_read | written:
            self._memory[place].uses[stream] = self._handler.seq_num
        if operator in _HOST_READS:
            self._handler._handle_stream_synchronization(stream)

    def host_reads(self, tensor: torch.Tensor) -> None:
        """The host waits for the current stream, and reads."""
        _ = torch.ops.aten.alias_copy(tensor.detach())
        self._handler._handle_stream_synchronization(self._number_of(self.current_stream()))

    def tell_allocator(self, tensor: torch.Tensor, stream: Stream) -> None:
        """The tensor's memory is used on the stream."""
        memory = self._memory.get(tensor.untyped_storage().data_ptr())
        if memory is not None:
            memory.told.add(self._number_of(stream))

    def _freed(self, place: int) -> None:
        memory = self._memory.pop(place)
        with contextlib.suppress(KeyError):
            self._handler._handle_memory_deallocation(place)
        knows = {memory.taken_on, *memory.told}
        for stream, number in memory.uses.items():
            is_over = any(self._handler.syncs.is_ordered_after(one, number, stream) for one in knows)
            if self._watches and not is_over:
                self.races.append(f"memory of stream {memory.taken_on} is freed while stream {stream} may use it")

    # What `FakeCuda` tells.

    def is_recorded(self, event: Any) -> None:
        event.number = next(self._count)
        self._handler._handle_event_creation(event.number)
        self._handler._handle_event_record(event.number, self._number_of(event.stream))

    def stream_waits(self, stream: Stream, event: Any) -> None:
        self._handler._handle_event_wait(event.number, self._number_of(stream))

    def host_waits(self, event: Any) -> None:
        if event is None:
            self._handler._handle_device_synchronization()
        else:
            self._handler._handle_event_synchronization(event.number)

    def has_waited_for(self, event: Any) -> bool:
        """Whether the host has."""
        syncs = self._handler.syncs
        reached, waited = syncs.recorded_sync_states[event.number], syncs.host_sync_state
        return all(number <= waited.get(stream, -1) for stream, number in reached.items())

    def new_event(self, enable_timing: bool = False) -> Event:
        return _OrderedEvent(self, enable_timing)

    def _number(self, device: torch.device | int | None) -> int:
        return super()._number(0 if isinstance(device, torch.device) and device.type == "cpu" else device)

    def _number_of(self, stream: Stream) -> int:
        if id(stream) not in self._numbers:
            self._numbers[id(stream)] = len(self._numbers)
            self._alive.append(stream)  # so that no other one gets its id
            self._handler._handle_stream_creation(self._numbers[id(stream)])
        return self._numbers[id(stream)]


def _forget_streams() -> None:
    """Another device is in place of this one, with other streams."""
    device_module._own_stream.cache_clear()
    device_module._stream_that_waits_for_none.cache_clear()


def _in_words(error: UnsynchronizedAccessError) -> str:
    one, other = error.current_access, error.previous_access
    return (
        f"{one.operator} ({_place(one)}) on stream {one.stream} does not wait for "
        f"{other.operator} ({_place(other)}) on stream {other.stream}"
    )


def _place(access: Any) -> str:
    """The line that launched the kernel: the innermost one that is neither torch's nor this file's."""
    for frame in reversed(access.stack_trace):
        name = frame.filename.rpartition("/")[2]
        if "site-packages" not in frame.filename and name not in ("stream_order.py", "python_group.py"):
            return f"{name}:{frame.lineno}"
    return "?"


class StreamFuture(torch.futures.Future[Any]):
    """A future of torch's for tensors on a GPU: each callback runs on a new stream, which waits for the result."""

    def __init__(self, cuda: OrderedCuda) -> None:
        super().__init__()
        self._cuda, self._calls = cuda, list[Callable[[], None]]()

    def set_result(self, result: Any) -> None:
        self._event = self._cuda.new_event()
        self._event.record()
        super().set_result(result)
        calls, self._calls = self._calls, []
        for call in calls:
            call()

    def then(self, callback: Callable[[Any], Any]) -> StreamFuture:  # type: ignore[override]
        child = StreamFuture(self._cuda)

        def call() -> None:
            with self._cuda.on_stream(self._cuda.new_stream()):
                self.wait()
                child.set_result(callback(self))

        if self.done():
            call()
        else:
            self._calls.append(call)
        return child

    def wait(self) -> Any:
        """The result, for which the current stream waits."""
        assert self.done()
        stream, result = self._cuda.current_stream(), super().value()
        stream.wait_event(self._event)
        for tensor in pytree.tree_leaves(result):
            self._cuda.tell_allocator(tensor, stream)
        return result


class _NcclWork(dist.Work):
    def __init__(self, cuda: OrderedCuda, held: list[torch.Tensor], future: StreamFuture) -> None:
        super().__init__()
        self._cuda, self._held, self._future = cuda, held, future
        self._end = cuda.new_event()
        self._end.record()

    def wait(self, timeout: Any = None) -> bool:
        self._cuda.current_stream().wait_event(self._end)
        self._held.clear()
        return True

    def get_future(self) -> StreamFuture:  # type: ignore[override]
        return self._future


class FakeNccl(PythonGroup):
    """A rank of some, of which all others give to each collective what this one gives."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._of_works: list[list[torch.Tensor]] = []
        self.names: list[str] = []
        """The collectives so far."""

    def use(self, cuda: OrderedCuda) -> None:
        """Run the collectives on a stream of that device."""
        self._cuda, self._stream = cuda, cuda.new_stream()

    def collective(self, call: Call) -> dist.Work:
        self._stream.wait_stream(self._cuda.current_stream())
        self.names.append(call.name)
        held = [*call.sent, *call.received]
        self._of_works.append(held)
        with self._cuda.on_stream(self._stream):
            perform([call] * self.size())
            future = StreamFuture(self._cuda)
            future.set_result(call.received)
            return _NcclWork(self._cuda, held, future)

    @property
    def held(self) -> list[torch.Tensor]:
        """What works hold: nobody has waited for them yet."""
        return [tensor for held in self._of_works for tensor in held]

    def look_again(self) -> None:
        """All works are over, as a thread of NCCL's finds sooner or later."""
        self._cuda.host_waits(None)
        for held in self._of_works:
            held.clear()


dist.Backend.register_backend("fake_nccl", lambda _store, rank, size, _timeout: FakeNccl(rank, size), devices=["cpu"])


def as_ddp_waits(hook: Hook) -> Hook:
    """The hook; at the end of a backward pass its stream waits for the futures, as DDP does where it is C++."""
    futures: list[StreamFuture] = []

    def wait() -> None:
        for future in futures:
            future.wait()
        futures.clear()

    def awaited(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if not futures:
            after_backward_computed(wait)
        done: Any = hook(state, bucket)
        futures.append(done)
        return done

    # DDP compares the annotations with its own types.
    awaited.__annotations__.update(bucket=GradBucket, **{"return": torch.futures.Future[torch.Tensor]})
    return awaited
