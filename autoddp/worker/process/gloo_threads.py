"""Waits until the threads of gloo are at rest, before their process group is freed and before Python ends.

A thread of gloo frees what its last collective held only after the script has been told that the collective is done.
That includes objects of Python: the callbacks of its future, and in torch 2.13 the `contextvars.Context` of a backward
pass. To free them the thread asks for the GIL, at a moment of its own:

- If Python is ending by then, CPython (before 3.14) ends the thread inside a C++ destructor: SIGABRT.
- If a DDP reducer frees the group meanwhile, it waits for the thread while it holds the GIL: the process hangs.
- If the thread itself frees the group, as the garbage collector may do in it, it waits for itself: SIGABRT again.

A thread at rest holds nothing and asks for nothing. Who waits for that does not have to know who else holds the group.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

_PATIENCE = 5.0  # seconds; a collective that waits for other ranks may take longer: then all goes on as without autoddp
_NAME = b"pt_gloo_runloop"
"""What torch calls the threads that run gloo's collectives, in /proc/self/task/*/comm."""
_TASKS = "/proc/self/task"
_FUTEX_WAIT_BITSET, _OPERATION = 9, 0x7F  # linux/futex.h; the other bits are flags
_PAUSE = 0.001  # seconds, without the GIL, for which the threads may be waiting
_LOOKS = int(_PATIENCE / _PAUSE)  # at most, where the script's clock stands still


def wait_for_rest() -> None:
    """Wait, for some seconds at most, until all threads of gloo in this process are at rest.

    Only Linux shows what a thread does: elsewhere this returns at once. Nothing that fails here may end the script. It
    may have put an `open` or a clock of its own in the place of Python's, or be a user by now who may not read Python's
    files, such as encodings.
    """
    with contextlib.suppress(Exception):
        end = time.monotonic() + _PATIENCE
        for _ in range(_LOOKS):
            if all(map(_rests, _threads())) or time.monotonic() > end:
                return
            time.sleep(_PAUSE)


def _threads() -> Iterator[str]:
    try:
        tasks = os.listdir(_TASKS)
    except OSError:
        return
    for task in tasks:
        # The script may have given a thread any name, which the kernel cuts after 15 bytes, also within a letter.
        if _read(task, "comm").strip() == _NAME:
            yield task


def _rests(task: str) -> bool:
    """Whether a thread waits, without a limit of time, for a condition variable: its queue is empty.

    A thread that waits for the GIL has a limit; for a mutex, another operation; one that runs shows no numbers.
    """
    words = _read(task, "syscall").split()  # number, six arguments, stack pointer, program counter
    if len(words) != 9:
        return not words  # it has ended
    operation, limit = int(words[2], 16), int(words[4], 16)
    return operation & _OPERATION == _FUTEX_WAIT_BITSET and limit == 0


def _read(task: str, name: str) -> bytes:
    try:
        with open(f"{_TASKS}/{task}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def destroy_groups_at_rest(first: Callable[[Any], object] = lambda group: None) -> None:
    """From here on `destroy_process_group` calls `first` with the group, and waits until gloo's threads are at rest.

    At that moment torch itself still holds the groups, so none can be freed by one of its own threads.
    """
    from torch import distributed

    before = distributed.destroy_process_group

    @functools.wraps(before)
    def destroy_process_group(group: Any = None) -> None:
        first(group)
        wait_for_rest()
        before(group)

    distributed.destroy_process_group = destroy_process_group
    distributed.distributed_c10d.destroy_process_group = destroy_process_group
