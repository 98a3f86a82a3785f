"""Page faults of this process: each time it touches memory first that the system gives it, the kernel fills a page.

glibc returns what a step has freed to the system, or keeps it, by rules that depend on the order of the first steps. So
two ranks of one script may differ in how often they get the same memory anew.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass

_LONGEST = 3e-6  # seconds of a page fault; with nested page tables one takes 1.5 to 2 µs, on bare metal about 0.5 µs


@dataclass(frozen=True)
class PageFaults:
    """Of all threads of this process."""

    count: int
    seconds: float
    """At most: the kernel's time for this process, if page faults can have taken all of it."""


class PageFaultCount:
    """`PageFaultCount().taken()`: the page faults since it was created."""

    def __init__(self) -> None:
        self._before = resource.getrusage(resource.RUSAGE_SELF)

    def taken(self) -> PageFaults:
        """Until now."""
        before, now = self._before, resource.getrusage(resource.RUSAGE_SELF)
        count = now.ru_minflt - before.ru_minflt
        return PageFaults(count, min(now.ru_stime - before.ru_stime, count * _LONGEST))


def peak_memory() -> int:
    """Bytes of memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
