"""Two GPUs that are not there: what torch.cuda's functions do with devices, streams, events and random numbers.

`cuda = FakeCuda(); cuda.install(monkeypatch)` puts its functions in place of torch.cuda's own. As there, a call that
names no device acts on the current one, and whatever acts on a device makes a context on it.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

CYCLES_PER_SECOND = 1.5e9


class Stream:
    def __init__(self, cuda: FakeCuda, device: int) -> None:
        self.device, self.seconds = torch.device("cuda", device), 0.0
        self.done = 0.0
        """How many of the seconds that were queued are over; only `Event.query` asks."""
        self.waited_for: list[Stream] = []
        self._cuda = cuda

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)
        event = self._cuda.new_event()
        event.record(other)
        self.wait_event(event)

    def wait_event(self, event: Event) -> None:
        self._cuda.stream_waits(self, event)

    def synchronize(self) -> None:
        event = self._cuda.new_event()
        event.record(self)
        event.synchronize()


class Event:
    def __init__(self, cuda: FakeCuda, is_timed: bool) -> None:
        self.is_timed = is_timed
        self._cuda = cuda

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or self._cuda.current_stream()
        self.seconds = self.stream.seconds
        self._cuda.is_recorded(self)

    def query(self) -> bool:
        return self.seconds <= self.stream.done

    def synchronize(self) -> None:
        self._cuda.host_waits(self)

    def elapsed_time(self, later: Event) -> float:
        assert self.is_timed
        return (later.seconds - self.seconds) * 1e3


class FakeCuda:
    """A subclass may look at the order of what is queued, by `is_recorded`, `stream_waits` and `host_waits`."""

    def __init__(self) -> None:
        self.current = 0
        self.contexts: set[int] = set()
        """Devices that something was done on."""
        self.streams: dict[int, Stream] = {number: Stream(self, number) for number in range(2)}
        self.waited: list[int] = []
        self.seeds: dict[int, list[int]] = defaultdict(list)
        self.reserved = {0: 0, 1: 0}
        self.captures = False

    @staticmethod
    def no_autocast(device_type: str, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """In place of `torch.autocast`, which asks for the device."""
        assert (device_type, enabled) == ("cuda", False)
        return contextlib.nullcontext()

    def install(self, monkeypatch: Any) -> None:
        ours = {"device": self.on_device, "stream": self.on_stream, "Stream": self.new_stream, "Event": self.new_event}
        ours["default_stream"] = self.current_stream
        ours["is_current_stream_capturing"] = lambda: self.captures
        ours["_sleep"] = lambda cycles: self.run(self._number(None), cycles / CYCLES_PER_SECOND)
        for name in ("synchronize", "current_stream", "manual_seed", "memory_reserved"):
            ours[name] = getattr(self, name)
        for name, function in ours.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def is_recorded(self, event: Event) -> None:
        """An event lies on its stream now."""

    def stream_waits(self, stream: Stream, event: Event) -> None:
        """What is queued on the stream from now on comes after the event."""

    def host_waits(self, event: Event | None) -> None:
        """The host has waited for the event; without one, for all that was queued."""

    def run(self, device: int, seconds: float) -> None:
        """Work of the script's on a device's stream."""
        self.streams[device].seconds += seconds

    def _number(self, device: torch.device | int | None) -> int:
        number = self.current if device is None else device.index if isinstance(device, torch.device) else device
        assert number is not None
        self.contexts.add(number)
        return number

    def synchronize(self, device: torch.device | int | None = None) -> None:
        self.waited.append(self._number(device))
        self.host_waits(None)

    def current_stream(self, device: torch.device | int | None = None) -> Stream:
        return self.streams[self._number(device)]

    def new_event(self, enable_timing: bool = False) -> Event:
        return Event(self, enable_timing)

    def new_stream(self, device: torch.device | int | None = None) -> Stream:
        return Stream(self, self._number(device))

    @contextlib.contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        number = self._number(stream.device)
        before, self.streams[number] = self.streams[number], stream
        try:
            yield
        finally:
            self.streams[number] = before

    @contextlib.contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, self._number(device)
        try:
            yield
        finally:
            self.current = before

    def manual_seed(self, number: int) -> None:
        self.seeds[self._number(None)].append(number)

    def memory_reserved(self, device: torch.device | int | None = None) -> int:
        return self.reserved[self._number(device)]
