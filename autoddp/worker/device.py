"""The device that a model is on, which need not be the process's current one.

torch.cuda's functions act on the current device unless they are told another. A script may put its model on a GPU
without ever calling `torch.cuda.set_device`: then GPU 0 is the current one in every rank, and a call without a device
would make a context there, some hundred MiB for each rank, and wait for or measure a GPU that does nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

import torch

_NEARLY_FULL = 0.1  # of a device's memory that is free


def devices_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """Each device that the tensors are on, in the order in which they come."""
    return list(dict.fromkeys(tensor.device for tensor in tensors))


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all work queued so far; a CPU has nothing queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def finish_queued_work(seconds: float) -> None:
    """Let every device on which this process has memory do what is queued, for at most so long.

    Other ranks wait for this one's part in a collective: in a process that ends before it they wait for NCCL's ten
    minutes. There is a limit because a collective may itself wait for a rank that is no more.
    """
    if not torch.cuda.is_initialized():
        return
    # By number, and only where there is memory: `synchronize` makes a context on a device that has none.
    devices = [number for number in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(number)]

    def wait() -> None:
        for number in devices:
            torch.cuda.synchronize(number)

    waiting = threading.Thread(target=wait, name="autoddp-device", daemon=True)
    waiting.start()
    waiting.join(seconds)


def as_current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make it the current device for a while, for functions of torch that know no other."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def give_back_spare_memory(device: torch.device) -> None:
    """Give memory that torch's allocator keeps for later back to the device, if the device is nearly full.

    What one configuration has left in pieces may not serve the next one, and NCCL allocates past torch's allocator.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if free < _NEARLY_FULL * total:
            with torch.cuda.device(device):
                torch.cuda.empty_cache()


@contextlib.contextmanager
def on_a_side_stream(device: torch.device) -> Iterator[None]:
    """What is queued meanwhile runs on a stream of its own, between what was queued before and what comes after."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.synchronize(device)


def seed(device: torch.device, number: int) -> None:
    """Seed the random numbers of the CPU and of this device, and of no other: `torch.manual_seed` seeds all GPUs."""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(number)


def memory_reserved(device: torch.device) -> int:
    """Bytes that torch's allocator holds there; 0 on a CPU."""
    return int(torch.cuda.memory_reserved(device)) if device.type == "cuda" else 0
