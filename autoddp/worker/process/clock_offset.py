"""How far this rank's clock is from that of rank 0, by stamps that travel to and fro through the job's store.

The clock is `time.perf_counter`, with which the stages of a step are stamped. Processes on one Linux kernel read the
same one, so their clocks differ by nothing. Otherwise a rank asks rank 0 for its time, as in NTP: it cannot know which
part of the round trip the question took and which the answer, so half of the trip is the error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

_ROUNDS = 10  # trips of which the shortest counts: the first waits until rank 0 listens, others meet a busy machine

Now = Callable[[], float]
Stamps = tuple[float, float, float, float]
"""Seconds at which the question left, arrived at rank 0, was answered there, and the answer arrived."""


class Store(Protocol):
    """What is needed of `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> Any:
        """Put a value there."""

    def get(self, key: str) -> Any:
        """Wait for a value."""


@dataclass(frozen=True)
class ClockOffset:
    """Seconds to add to a time of this rank's clock to have it on the clock of rank 0."""

    seconds: float = 0.0
    error: float = 0.0
    """Seconds by which that may be wrong."""


def offset_of(trips: Iterable[Stamps]) -> ClockOffset:
    """The offset as the shortest trip gives it, whose error is the smallest.

    >>> offset_of([(10.0, 110.1, 110.2, 10.5), (20.0, 120.1, 120.3, 20.4)])  # rank 0 is 100 seconds ahead
    ClockOffset(seconds=100.0, error=0.1)
    """
    asked, received, answered, heard = min(trips, key=_length)
    seconds = ((received - asked) + (answered - heard)) / 2
    return ClockOffset(round(seconds, 9), round(max(0.0, _length((asked, received, answered, heard)) / 2), 9))


def _length(trip: Stamps) -> float:
    """Seconds on the way, without what the answer took at rank 0."""
    asked, received, answered, heard = trip
    return (heard - asked) - (answered - received)


def mean_of(before: ClockOffset, after: ClockOffset) -> ClockOffset:
    """The offset between two moments: a clock that has drifted meanwhile is wrong by half of that at most."""
    drifted = abs(after.seconds - before.seconds) / 2
    return ClockOffset((before.seconds + after.seconds) / 2, max(before.error, after.error) + drifted)


def ask(store: Store, key: str, now: Now = time.perf_counter) -> ClockOffset:
    """Ask rank 0 for its clock, which must `answer` at the same time under the same key."""
    trips: list[Stamps] = []
    for trip in range(_ROUNDS):
        asked = now()
        store.set(f"{key}/{trip}/asked", "")
        received, answered = json.loads(store.get(f"{key}/{trip}/answered"))
        trips.append((asked, received, answered, now()))
    return offset_of(trips)


def answer(store: Store, key: str, now: Now = time.perf_counter) -> None:
    """Answer one other rank; called on rank 0."""
    for trip in range(_ROUNDS):
        store.get(f"{key}/{trip}/asked")
        received = now()
        store.set(f"{key}/{trip}/answered", json.dumps([received, now()]))


def clock_name() -> str:
    """A text that is the same in processes that read the same clock; "" where that is not known.

    The clock counts from the kernel's start, and a time namespace may shift it.
    """
    if not sys.platform.startswith("linux"):
        return ""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/time")
    except OSError:
        return ""
