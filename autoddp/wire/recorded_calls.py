"""The file in which a process of the script notes its collectives, while `autoddp diagnose` watches.

    shared = made_file(path)       # in the process of the script
    numbers = mapped(path)         # in the launcher, at any moment, also after the process was killed

A process has one file, `NAME.calls`, in memory that it shares with the file: what was written stays when the process
is killed, and neither an exit hook nor a thread has to save it. All are numbers, but for the names at the end:

    HEADER numbers             see `Header`
    PLACES times OF_A_PLACE    sums of each place, as they were at the last look
    CALLS times OF_A_CALL      the last calls, in a ring: call number n is at n modulo CALLS
    NAMES bytes                a JSON object on each line: what the process is, and each place and group in the numbers

Times are seconds of `time.perf_counter`, which all processes of a host read from one clock of the kernel.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from typing import Any

from autoddp import codec
from autoddp.codec import Struct

CALLS = 32_768
"""Single calls that are kept. Sums go on beyond them."""
PLACES = 8_192
"""Places that are told apart; what comes later is counted under the last one. Each group that is made has its own."""
HEADER, OF_A_PLACE, OF_A_CALL = 24, 4, 11
SHORT_GAP = 5e-5
"""Seconds between two calls, below which the CPU time is not looked at."""
PLACES_FROM = HEADER
CALLS_FROM = HEADER + PLACES * OF_A_PLACE
NAMES = 2**21
"""Bytes for names: four thousand groups, each with a place."""
_NAMES_FROM = 8 * (CALLS_FROM + CALLS * OF_A_CALL)
_SIZE = _NAMES_FROM + NAMES
WATCH = "watch"
"""Name of a file in the folder. Once it is there, processes look for some steps where results are first used."""
TRIAL = "threads.json"
"""Name of a file in the folder with a `ThreadsTrial`."""
WITH_GROUPS = ("init_process_group", "new_group", "split_group", "destroy_process_group")
"""Functions of torch.distributed that make or destroy a process group. Their calls are noted as calls of no group."""
OF_SPARSE = "_sparse"
"""The end of `PlaceNamed.method` where a call is given sparse tensors: it is not done again."""
VARIABLE = "AUTODDP_RECORDS_CALLS"
"""Environment variable: "PORT:FOLDER", see `RecordingPlan`. `inject/sitecustomize.py` spells this name again."""


class Header:
    """What the first numbers of the file are."""

    CALLS_MADE = 0
    """Calls so far, also those that the ring has lost."""
    BEGAN = 1
    """When the process opened the file, at its first call."""
    PAUSED = 2
    """Seconds for which nothing was recorded."""
    WAITED_IN_GAPS, GAPS = 3, 4
    """Seconds for which the thread has waited for a core between its calls, and of all that time, where it was looked
    at. They are 0 where that is not known."""
    NAMES = 5
    """Bytes of names so far."""
    FIRST_LOOK, LAST_LOOK = 8, 16
    """Numbers at which what the kernel says begins, see `LOOK`: after a third of the time, and at the last look."""


LOOK = ("at", "cpu_of_thread", "cpu_of_process", "waited_of_thread", "waited_of_helpers", "pauses")
"""What each look at the kernel's accounts notes, in seconds: CPU time, and time without a core; and how often the
thread has given up its core by itself."""
SUMS = ("count", "bytes", "in_calls", "in_waits")
"""The sums of each place: calls, their bytes, seconds in the calls themselves, and in waits for their ends."""
CALL = (
    *("place", "number", "bytes", "began", "returned", "wait_began", "wait_ended", "is_blocking"),
    *("cpu_returned", "cpu_waited", "root"),
)
"""The numbers of each call. `number` counts the calls of its group, in which all of its ranks take part; -1 for others.
Of what is done with groups it is that of `GroupEventNamed`.

`wait_ended` is 0 for a call for whose end nothing has waited. `is_blocking` is 1 where torch itself has waited, before
the function that the script has called returned.

`cpu_returned` is the CPU time of the thread when the call has returned, and `cpu_waited` when the script itself has
waited for its end: so what it computes between two calls is told from what it sleeps there. They are 0 in another
thread than that of the first call. `cpu_waited` is 0 where `is_blocking` is 1, and `cpu_returned` is 0 behind a gap of
less than `SHORT_GAP`, in which a thread hardly sleeps. What is no call of a group counts as one that returns at once
and is waited for: so it has both, from its begin and its end.

`root` is the rank in the group that sends to the others, or collects; -1 for calls in which all do the same.
"""


class RecordingPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """What a process of the script has to know to record its calls."""

    folder: str
    port: str = ""
    """The port at which torchrun's agent has a store, as the rank that is this process, or has started it, was told."""

    @property
    def text(self) -> str:
        """The variable's value."""
        return f"{self.port}:{self.folder}"

    @classmethod
    def parse(cls, text: str) -> RecordingPlan:
        """The inverse of `text`."""
        port, _, folder = text.partition(":")
        return cls(folder, port)


class ThreadsTrial(Struct, frozen=True, forbid_unknown_fields=True):
    """Turns in which each rank has fewer threads than the script has given it, and turns as written: A B B A A B …"""

    threads: int
    begins: float
    """By `time.perf_counter`, as the calls."""
    turn: float
    """Seconds of a turn."""
    turns: int

    @property
    def ends(self) -> float:
        """The end of the last turn."""
        return self.begins + self.turns * self.turn

    def turn_at(self, at: float) -> int:
        """The number of the turn at this time; -1 before the first one, and from the end on it is `turns`."""
        return min(self.turns, max(-1, int((at - self.begins) // self.turn)))

    def has_fewer(self, turn: int) -> bool:
        """Whether that is a turn with fewer threads."""
        return 0 <= turn < self.turns and turn % 4 in (1, 2)


class Named(Struct, frozen=True, forbid_unknown_fields=True, tag_field="is", tag=True):
    """A line of the names."""


class ProcessNamed(Named, frozen=True):
    """The process, at its first call."""

    pid: int
    parent: int
    is_launched: bool
    """Whether autoddp has started it as a rank; else a process of the script has started it."""
    launched_rank: int | None
    """The rank that it is, or that has started it; None where no variable says it."""
    host: str
    cores: int
    """CPU cores on which it may run."""


class WorldNamed(Named, frozen=True):
    """What the process is in torch's default process group; once for each time that the script makes one."""

    rank: int
    ranks: int
    threads: int
    """Threads of torch's operators."""
    interface: str = ""
    """The network interface that the backend was told to go over, by its variable; "" where it was told none."""


class GroupNamed(Named, frozen=True):
    """A process group, once a call of it is recorded."""

    group: int
    """Number in this file."""
    name: str
    """torch's name of it: the same on all ranks of a world."""
    ranks: tuple[int, ...]
    """Ranks of it, as numbered in the world."""
    backend: str


class PlaceNamed(Named, frozen=True):
    """A place in the script from which a collective of a group is called."""

    place: int
    """Number in this file."""
    file: str
    line: int
    function: str
    collective: str
    """The function of torch.distributed that the script calls, such as `all_gather_object`; of sparse tensors
    "sparse all_reduce"."""
    method: str
    """The method of the group to which that leads; of sparse tensors with `OF_SPARSE` behind it."""
    part: int
    """Several methods may serve one call of a function: `all_gather_object` gathers sizes first."""
    group: int
    """-1 for what is no call of a group: an optimizer's step."""
    device: str
    dtype: str
    reduction: str = ""
    """How the numbers of the ranks become one, such as "RedOpType.SUM"; "" where they only travel."""
    by: str = ""
    """The file of torch that makes the call, such as "distributed/fsdp/_runtime_utils.py"; "" where the script does."""
    thread: int = 0
    """Which of the script's threads has called from here first, in the order in which they are seen; -1 for one that is
    not Python's, such as that of a backward pass on a GPU: another thread waits for it."""


class GroupEventNamed(Named, frozen=True):
    """The process group that a call has made or destroyed; the place of the call says which of both."""

    event: int
    """The number of the call, which counts what was done with groups."""
    name: str
    """torch's name of the group; "" where this rank is none of its ranks, or the group is not known."""
    ranks: tuple[int, ...]


class WaitsNamed(Named, frozen=True):
    """How much of its waits for calls the thread computed, while first uses were looked at: from 0 to 1."""

    computes: float


LAST_NTH = 63
"""The last call from a place in a step that is told apart; those after it count as one with it."""


class UsedNamed(Named, frozen=True):
    """The first use of what calls from a place have changed, after the script has waited for them."""

    place: int
    calls: int
    """Calls, and waits for later ends, that lie in between."""
    share: float
    """How much of the time from the last of them to the next one has passed then: from 0 to 1."""
    file: str
    line: int
    """The line of the script that uses it."""
    nth: int = -1
    """Which call from the place since an optimizer's step, from 0 to `LAST_NTH`, this holds for; -1: of all of them."""
    scaled: int = 0
    """The line before it that multiplies the result by a number, in place; 0 for none."""
    scaled_in: str = ""
    """The file of that line, which may be another one: a helper makes the mean, and the script's loop uses it."""


class BuildsNamed(Named, frozen=True):
    """Most calls from a place are given what comes from the call so many before: they cannot be one call with it.

    Or it is a loop, with so many calls in each step: those of the next step are given what comes from these.
    """

    place: int
    back: int = 1


class HiddenNamed(Named, frozen=True):
    """What has communicated past the methods of groups, while first uses were looked at."""

    what: str
    """ "DTensor", of whose operations only some do so (none in an optimizer's step), or "functional collectives"."""


def made_file(path: str) -> mmap.mmap:
    """A new file of numbers, all 0, in memory that is shared with it. OSError where it cannot be made."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(file, 0, _SIZE)  # a full disk is an error here, and no SIGBUS in the middle of the script
        return mmap.mmap(file, _SIZE)
    finally:
        os.close(file)


def mapped(path: str) -> Any:
    """A memoryview of the numbers of the file, as they are at each moment. OSError, or ValueError where it is none."""
    file = os.open(path, os.O_RDONLY)
    try:
        if os.fstat(file).st_size != _SIZE:
            raise ValueError(f"{path} is no file of recorded calls")
        return memoryview(mmap.mmap(file, _SIZE, access=mmap.ACCESS_READ)).cast("d")
    finally:
        os.close(file)


def add_name(shared: mmap.mmap, named: Named) -> None:
    """Write a line of the names behind the others; ValueError where there is no room for it.

    It opens no file: for that the isolation has a hook, which would take more time than all the rest.
    """
    text = f"{codec.encode(named)}\n".encode(errors="surrogateescape")
    (length,) = _NUMBER.unpack_from(shared, 8 * Header.NAMES)
    begin = _NAMES_FROM + int(length)
    if begin + len(text) > _SIZE:
        raise ValueError("too many places and groups to name them all")
    shared[begin : begin + len(text)] = text
    _NUMBER.pack_into(shared, 8 * Header.NAMES, length + len(text))  # only now: a line is there as a whole


def names(numbers: Any, begin: int = 0) -> Iterator[Named]:
    """The lines of the names, from that byte of them on. `numbers`: see `mapped`."""
    end = int(numbers[Header.NAMES])
    text = bytes(numbers.cast("B")[_NAMES_FROM + begin : _NAMES_FROM + end])
    for one in text.decode(errors="surrogateescape").split("\n")[:-1]:
        yield codec.decode(one, _LINES)


_NUMBER = struct.Struct("d")
_LINES: Any = (
    ProcessNamed
    | WorldNamed
    | GroupNamed
    | PlaceNamed
    | GroupEventNamed
    | UsedNamed
    | BuildsNamed
    | WaitsNamed
    | HiddenNamed
)
