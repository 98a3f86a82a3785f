"""Functions on the device that a model is on, which may differ from the process's current device.

Functions of torch.cuda act on the current device unless they are given another. A script may put its model on a GPU
without calling `torch.cuda.set_device`. Then GPU 0 is the current device of every rank, and a call without a device
would create a context there, some hundred MiB for each rank, and wait for, or measure, the wrong GPU.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch

from autoddp.topology import GpuClock, read_gpu_clock

Stream = torch.cuda.Stream
Event = torch.cuda.Event

GPU_TYPES = ["cuda"]
"""Types of devices with streams. A test that takes the CPU for such a device adds its type."""

_CYCLES = 10_000_000  # some milliseconds of a GPU's clock
_NEARLY_FULL = 0.1  # share of a device's memory: the device is nearly full if less than that is free


def devices_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """The devices of the tensors, each once, in the order of the tensors."""
    return list(dict.fromkeys(tensor.device for tensor in tensors))


def is_gpu(device: torch.device) -> bool:
    """Whether work is queued on streams of the device, which runs it later; a CPU has done it at once."""
    return device.type in GPU_TYPES


def why_not_timed(device: torch.device) -> str:
    """Why the steps of a model on that device cannot be timed; "" if they can.

    An accelerator of another kind (xpu, hpu, npu, mps, xla) does its work later too, and nothing here waits for it:
    what is timed would be the time that Python takes to queue a step.
    """
    if device.type == "cpu" or is_gpu(device):
        return ""
    return f"its model is on {device.type}, and only steps on CPUs and on CUDA or ROCm GPUs can be timed"


def current_stream(device: torch.device) -> Stream:
    """The stream of a GPU on which this thread queues its work now."""
    return torch.cuda.current_stream(device)


def mark(stream: Stream, timed: bool = True) -> Event:
    """Queue an event behind what is queued on the stream. Only a `timed` one has a time."""
    event = torch.cuda.Event(enable_timing=timed)
    event.record(stream)
    return event


def stamp(device: torch.device) -> Any:
    """This moment: on a GPU an event behind what is queued on its current stream, else `time.perf_counter`."""
    return mark(current_stream(device)) if is_gpu(device) else time.perf_counter()


def seconds_between(device: torch.device, before: Any, after: Any) -> float:
    """Seconds from one stamp to another one, both of which the device has reached."""
    return float(before.elapsed_time(after) / 1e3 if is_gpu(device) else after - before)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all work queued so far; a CPU has nothing queued."""
    if is_gpu(device):
        torch.cuda.synchronize(device)


def is_capturing(device: torch.device) -> bool:
    """Whether the device's current stream records a CUDA graph: then nobody may wait for the device."""
    if not is_gpu(device):
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def finish_queued_work(seconds: float) -> None:
    """Wait until every device on which this process has memory has done its queued work, for at most `seconds`.

    If a process ended with a collective queued, the other ranks would wait for NCCL's ten minutes. The limit is needed
    because the collective may itself wait for a rank that has died.
    """
    if not torch.cuda.is_initialized():
        return
    # Only devices with memory of ours: `synchronize` would create a context on any other device.
    devices = [number for number in range(torch.cuda.device_count()) if _has_memory(number)]

    def wait() -> None:
        for number in devices:
            torch.cuda.synchronize(number)

    waiting = threading.Thread(target=wait, name="autoddp-device", daemon=True)
    try:
        waiting.start()
    except RuntimeError:  # in an exit handler Python begins no thread, from 3.12 on; the launcher ends who stays
        return wait()
    waiting.join(seconds)


def _has_memory(number: int) -> bool:
    try:
        return bool(torch.cuda.memory_reserved(number))
    except RuntimeError:  # an allocator that the script has put in place of torch's, as RAPIDS', does not tell
        return bool(cast("Any", torch._C)._cuda_hasPrimaryContext(number))


class Backlog:
    """Tells whether a device is stuck in what was queued on it, as it is where a collective waits for other ranks.

    Of a device that is at work, each answer is about other work than the one before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reached: Event | None = None

    def is_stuck(self) -> bool:
        """Whether the device has not yet done what was queued when this last returned False. Waits for nothing."""
        if not is_gpu(self._device):
            return False
        if self._reached is not None and not self._reached.query():
            return True
        self._reached = mark(torch.cuda.default_stream(self._device), timed=False)
        return False


def keep_busy(device: torch.device, seconds: float) -> None:
    """Queue so many seconds of doing nothing on the device's current stream, behind what is queued there already.

    Nothing is queued on a CPU, nor while the stream is captured: the pause would be a part of the graph.
    """
    if not is_gpu(device) or is_capturing(device):
        return
    with torch.cuda.device(device):
        torch.cuda._sleep(int(seconds * _cycles_per_second(device)))


@functools.cache
def _cycles_per_second(device: torch.device) -> float:
    """Cycles per second of the clock by which `torch.cuda._sleep` counts, as it runs now. Waits for the device."""
    stream = current_stream(device)
    with torch.cuda.device(device):
        began = mark(stream)
        torch.cuda._sleep(_CYCLES)
        ended = mark(stream)
    torch.cuda.synchronize(device)
    seconds: float = began.elapsed_time(ended) / 1e3
    return _CYCLES / max(seconds, 1e-6)


def clock_of(device: torch.device) -> GpuClock | None:
    """How fast the device's processors run now; None for a CPU, and where the driver does not tell."""
    if device.type != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)  # torch has it for CUDA, not for ROCm
    return None if uuid is None else read_gpu_clock(f"GPU-{uuid}")


def as_current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which `device` is the current device, for functions of torch that take no device."""
    return torch.cuda.device(device) if is_gpu(device) else contextlib.nullcontext()


def give_back_spare_memory(device: torch.device) -> None:
    """Return the memory that torch's allocator keeps for later to the device, if the device is nearly full.

    Fragments that one configuration leaves may be useless to the next one, and NCCL does not use torch's allocator.
    """
    if is_gpu(device):
        free, total = torch.cuda.mem_get_info(device)
        if free < _NEARLY_FULL * total:
            with torch.cuda.device(device):
                torch.cuda.empty_cache()


def has_room(device: torch.device, size: int) -> bool:
    """Whether twice so many bytes are free on the device, beside what torch's allocator holds; on a CPU always.

    The other half is left for what the script needs at other moments of its step.
    """
    return not is_gpu(device) or 2 * size <= torch.cuda.mem_get_info(device)[0]


@contextlib.contextmanager
def on_a_side_stream(device: torch.device) -> Iterator[None]:
    """A context whose work runs on a separate stream, after the work queued before; its end waits for all of it."""
    if not is_gpu(device):
        yield
        return
    with _on_stream(torch.cuda.Stream(device)):
        yield
    torch.cuda.synchronize(device)


@contextlib.contextmanager
def beside_the_current_stream(device: torch.device) -> Iterator[None]:
    """A context whose work runs on another stream, after the work queued before; nothing waits for its end."""
    with _on_stream(_own_stream(device)) if is_gpu(device) else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def ready_at_once(device: torch.device) -> Iterator[None]:
    """A context whose work waits for none that was queued before; its end waits for that work alone, on the host.

    So any stream may use the result, as it may use what lies in the host's memory.
    """
    if not is_gpu(device):
        yield
        return
    stream = _stream_that_waits_for_none(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@functools.cache
def _stream_that_waits_for_none(device: torch.device) -> Stream:
    return torch.cuda.Stream(device)


@functools.cache
def _own_stream(device: torch.device) -> Stream:
    """One stream for all models and trials, because the allocator reuses freed memory only on the same stream."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _on_stream(stream: Stream) -> Iterator[None]:
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


def keep_for_current_stream(tensor: torch.Tensor) -> None:
    """Tell torch's allocator that the current stream uses the tensor's memory, which was taken on another stream.

    Without it that memory would be given away as soon as the tensor is freed, though its use may be queued still.
    """
    if is_gpu(tensor.device):
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def future_on(device: torch.device) -> torch.futures.Future[Any]:
    """A future for tensors on `device`: who waits for it waits on the streams of a GPU, not on the host."""
    devices: list[int | str | torch.device] = [device] if device.type != "cpu" else []
    return torch.futures.Future(devices=devices)


def seed(device: torch.device, number: int) -> None:
    """Seed the random generators of the CPU and of `device` only; `torch.manual_seed` would seed all GPUs."""
    torch.default_generator.manual_seed(number)
    if is_gpu(device):
        with torch.cuda.device(device):
            torch.cuda.manual_seed(number)


def name_of(device: torch.device) -> str:
    """The GPU's name, or the type of another device."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else device.type


def pci_address(device: torch.device) -> str | None:
    """The address of a GPU on the PCI bus, as the system writes it; None where torch does not tell, before 2.7."""
    of = torch.cuda.get_device_properties(device)
    address = [getattr(of, name, -1) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    return None if -1 in address else "{:04x}:{:02x}:{:02x}.0".format(*address)


def nccl_version() -> tuple[int, ...]:
    """The version of NCCL that torch brings."""
    return tuple(torch.cuda.nccl.version())


def frees_memory(device: torch.device) -> bool:
    """Whether torch's allocator had to give memory back to the device in order to get other memory."""
    try:
        return is_gpu(device) and torch.cuda.memory_stats(device).get("num_alloc_retries", 0) > 0
    except RuntimeError:  # see `_has_memory`
        return False


def memory_reserved(device: torch.device) -> int:
    """Bytes that torch's allocator holds on `device`; 0 on a CPU, and where another allocator has its place."""
    try:
        return int(torch.cuda.memory_reserved(device)) if is_gpu(device) else 0
    except RuntimeError:  # see `_has_memory`
        return 0
