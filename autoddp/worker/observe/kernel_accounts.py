"""What the kernel has noted of a process: page faults, and how long its threads have waited for a core.

A page fault fills a page of memory that the process touches first. glibc returns what a step has freed to the system,
or keeps it, by rules that depend on the order of the first steps. So two ranks of one script may differ in how often
they get the same memory anew.
"""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path

_LONGEST = 2e-6  # seconds of a page fault: 1.5 to 1.9 µs were measured with nested page tables, less without
_FAULTS, _IN_KERNEL = 7, 12  # numbers behind the name in /proc/self/stat, see proc(5)


@dataclass(frozen=True)
class PageFaults:
    """Page faults of all threads of a process."""

    count: int
    seconds: float
    """Seconds that they took, at most: the kernel's time for the process, if page faults can have taken all of it."""


class PageFaultCount:
    """`PageFaultCount().taken()`: the page faults since it was created; none where the system does not tell.

    Of this process, or of the one with the number `pid`, as long as it runs.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._process = "self" if pid is None else str(pid)
        self._before = _now(self._process)

    def taken(self) -> PageFaults:
        """The page faults until now. The kernel counts its time in hundredths of a second."""
        (faults, seconds), before = _now(self._process), self._before
        count = faults - before[0]
        return PageFaults(max(0, count), max(0.0, min(seconds - before[1], count * _LONGEST)))


def _now(process: str) -> tuple[int, float]:
    """Page faults of a process so far, and seconds that the kernel has worked for it.

    Not by `resource`, which torch does not import: a file of that name beside the script would be imported instead.
    """
    try:
        numbers = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
        return int(numbers[_FAULTS]), int(numbers[_IN_KERNEL]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):  # no Linux
        return 0, 0.0


def peak_memory(pid: int | None = None) -> int:
    """Bytes of memory that this process, or that one, has had at most; 0 where the system does not tell."""
    try:
        status = Path(f"/proc/{'self' if pid is None else pid}/status").read_text(errors="replace")
        found = re.search(r"VmHWM:\s+(\d{1,15}) kB", status)
    except OSError:
        return 0
    return int(found.group(1)) * 1024 if found else 0


@dataclass(frozen=True)
class WaitedForCpu:
    """Seconds for which threads of this process could have run and had no core."""

    trains: float = 0.0
    """Seconds of the thread that trains."""
    helpers: float = 0.0
    """Seconds of all other threads together: those that move gradients, and those of operators that have several."""
    helpers_ran: float = 0.0
    """Seconds for which those other threads had a core."""

    def __sub__(self, before: WaitedForCpu) -> WaitedForCpu:
        # The accounts of threads that have ended meanwhile are gone.
        helpers, ran = self.helpers - before.helpers, self.helpers_ran - before.helpers_ran
        return WaitedForCpu(self.trains - before.trains, max(0.0, helpers), max(0.0, ran))


def waited_for_cpu() -> WaitedForCpu:
    """What threads have waited since they began; 0 where that is not known. Call it in the thread that trains."""
    trains, helpers, helpers_ran, mine = 0, 0, 0, str(threading.get_native_id())
    try:
        tasks = os.listdir("/proc/self/task")
    except OSError:  # no Linux
        tasks = []
    for task in tasks:  # not by `pathlib`, which takes four times as long: there may be hundreds
        try:
            file = os.open(f"/proc/self/task/{task}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            try:
                ran, waited = map(int, os.read(file, 64).split()[:2])
            finally:
                os.close(file)
        except (OSError, IndexError, ValueError):  # the thread has ended
            continue
        if task == mine:
            trains = waited
        else:
            helpers, helpers_ran = helpers + waited, helpers_ran + ran
    return WaitedForCpu(trains / 1e9, helpers / 1e9, helpers_ran / 1e9)


class CoreWaits:
    """Tells for which share of the time between its calls a thread waits for a core.

    It is the thread that creates it. The kernel has one account of all that a thread waits. It is looked at when a call
    begins, when the wait for its end begins, which may be much later, and when that is over, through a file that stays
    open: 2 µs, without an audit event. The calls of other threads do not count.
    """

    def __init__(self) -> None:
        self.waited = self.seconds = 0.0
        """Seconds for which it has waited between its calls so far, and seconds of all that time."""
        self.thread = threading.get_ident()
        self._before = (0, 0.0)  # the account in nanoseconds, and the time, at the last look
        self._counts = False  # whether what comes after that look is counted
        self._since_call = (0.0, 0.0)  # what was waited, and how long that was, until the wait for the end began
        self._file = -1

    def begins(self) -> None:
        """Look before a call."""
        if threading.get_ident() == self.thread:
            self._add(*self._look())

    def wait_begins(self) -> None:
        """Look before a wait for the end of a call."""
        if threading.get_ident() == self.thread:
            self._since_call = self._look()

    def ends(self, is_blocking: bool) -> None:
        """Look at the end of a call. `is_blocking`: its wait came at once; else it has computed before the wait."""
        if threading.get_ident() == self.thread:
            self._look()
            if not is_blocking:
                self._add(*self._since_call)
            self._since_call = (0.0, 0.0)

    def forget(self) -> None:
        """Begin to count anew."""
        self.waited = self.seconds = 0.0

    def pass_over(self) -> None:
        """Do not count what comes before the next look."""
        self._counts, self._since_call = False, (0.0, 0.0)

    def _add(self, waited: float, seconds: float) -> None:
        self.waited += waited
        self.seconds += seconds

    def _look(self) -> tuple[float, float]:
        """Seconds that were waited since the last look, and seconds of that time; 0 where they do not count."""
        try:
            if self._file < 0:
                self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            now = int(os.pread(self._file, 64, 0).split()[1]), time.perf_counter()
        except (OSError, IndexError, ValueError):  # no Linux; or the script has closed files that are not its own
            self.pass_over()
            self.thread = 0
            return 0.0, 0.0
        (waited, at), self._before = self._before, now
        counts, self._counts = self._counts, True
        return ((now[0] - waited) / 1e9, now[1] - at) if counts else (0.0, 0.0)


def pauses() -> int:
    """How often this thread has given up its core by itself, to sleep or to wait; 0 where that is not known."""
    try:
        status = Path(f"/proc/self/task/{threading.get_native_id()}/status").read_text(errors="replace")
    except OSError:  # no Linux
        return 0
    found = re.search(r"^voluntary_ctxt_switches:\s+(\d{1,15})$", status, re.MULTILINE)
    return int(found.group(1)) if found else 0
