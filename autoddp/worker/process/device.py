"""Functions on the device that a model is on, which may differ from the process's current device.

Functions of torch.cuda act on the current device unless they are given another. A script may put its model on a GPU
without calling `torch.cuda.set_device`. Then GPU 0 is the current device of every rank, and a call without a device
would create a context there, some hundred MiB for each rank, and wait for, or measure, the wrong GPU.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator

import torch

from autoddp.topology import GpuClock, read_gpu_clock

_CYCLES = 10_000_000  # some milliseconds of a GPU's clock
_NEARLY_FULL = 0.1  # share of a device's memory: the device is nearly full if less than that is free


def devices_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """The devices of the tensors, each once, in the order of the tensors."""
    return list(dict.fromkeys(tensor.device for tensor in tensors))


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all work queued so far; a CPU has nothing queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_capturing(device: torch.device) -> bool:
    """Whether the device's current stream records a CUDA graph: then nobody may wait for the device."""
    if device.type != "cuda":
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
    devices = [number for number in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(number)]

    def wait() -> None:
        for number in devices:
            torch.cuda.synchronize(number)

    waiting = threading.Thread(target=wait, name="autoddp-device", daemon=True)
    waiting.start()
    waiting.join(seconds)


class Backlog:
    """Tells whether a device is stuck in what was queued on it, as it is where a collective waits for other ranks.

    Of a device that is at work, each answer is about other work than the one before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reached: torch.cuda.Event | None = None

    def is_stuck(self) -> bool:
        """Whether the device has not yet done what was queued when this last returned False. Waits for nothing."""
        if self._device.type != "cuda":
            return False
        if self._reached is not None and not self._reached.query():
            return True
        self._reached = torch.cuda.Event()
        self._reached.record(torch.cuda.default_stream(self._device))
        return False


def keep_busy(device: torch.device, seconds: float) -> None:
    """Queue so many seconds of doing nothing on the device's current stream, behind what is queued there already.

    Nothing is queued on a CPU, nor while the stream is captured: the pause would be a part of the graph.
    """
    if device.type != "cuda" or is_capturing(device):
        return
    with torch.cuda.device(device):
        torch.cuda._sleep(int(seconds * _cycles_per_second(device)))


@functools.cache
def _cycles_per_second(device: torch.device) -> float:
    """Cycles per second of the clock by which `torch.cuda._sleep` counts, as it runs now. Waits for the device."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)
    with torch.cuda.device(device):
        began.record(stream)
        torch.cuda._sleep(_CYCLES)
        ended.record(stream)
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
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def give_back_spare_memory(device: torch.device) -> None:
    """Return the memory that torch's allocator keeps for later to the device, if the device is nearly full.

    Fragments that one configuration leaves may be useless to the next one, and NCCL does not use torch's allocator.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if free < _NEARLY_FULL * total:
            with torch.cuda.device(device):
                torch.cuda.empty_cache()


def has_room(device: torch.device, size: int) -> bool:
    """Whether twice so many bytes are free on the device, beside what torch's allocator holds; on a CPU always.

    The other half is left for what the script needs at other moments of its step.
    """
    return device.type != "cuda" or 2 * size <= torch.cuda.mem_get_info(device)[0]


@contextlib.contextmanager
def on_a_side_stream(device: torch.device) -> Iterator[None]:
    """A context whose work runs on a separate stream, after the work queued before; its end waits for all of it."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.synchronize(device)


def seed(device: torch.device, number: int) -> None:
    """Seed the random generators of the CPU and of `device` only; `torch.manual_seed` would seed all GPUs."""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(number)


def memory_reserved(device: torch.device) -> int:
    """Bytes that torch's allocator holds on `device`; 0 on a CPU."""
    return int(torch.cuda.memory_reserved(device)) if device.type == "cuda" else 0
