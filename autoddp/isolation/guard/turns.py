"""One change at a time, over all processes of the attempt, and reading without a lock.

A number in the scratch grows with every change. It is odd while a change is between two steps; who reads then takes the
lock as well and waits for the few microseconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from autoddp.isolation.guard import real

T = TypeVar("T")


class Turns:
    """The lock, and the number of changes so far.

    with turns.taken():
        ...                # nobody else changes anything
        turns.begin()      # from here on readers wait
        ...
    """

    def __init__(self, scratch: str) -> None:
        self._lock_path = f"{scratch}/lock"
        descriptor = real.open(f"{scratch}/number", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if real.fstat(descriptor).st_size < 8:
                real.functions["ftruncate"](descriptor, 8)
            self._number = mmap.mmap(descriptor, 8)
        finally:
            real.close(descriptor)
        self._threads = threading.RLock()
        self._depth = 0
        self._owner = 0
        # No other thread may hold the lock at a fork: the child would keep it for ever.
        release = self._threads.release
        os.register_at_fork(before=self._threads.acquire, after_in_parent=release, after_in_child=release)

    def number(self) -> int:
        """How many changes there were; odd in the middle of one."""
        return int.from_bytes(self._number[:8], "little")

    def _set(self, number: int) -> None:
        self._number[:8] = number.to_bytes(8, "little")

    def mine(self) -> bool:
        """Whether this thread holds the lock."""
        return self._owner == threading.get_ident()

    def begin(self) -> None:
        """A change follows: readers wait until the lock is given back, and forget what they remember of folders."""
        self._set(self.number() | 1)

    def steady(self, look: Callable[[], T]) -> T:
        """What `look` finds while nobody else is changing anything; it is tried again, and at last with the lock."""
        if self.mine():
            return look()
        for _ in range(3):
            number = self.number()
            if number % 2:  # someone is in the middle of a change that takes more than one step
                break
            try:
                found = look()
            except OSError:
                if self.number() == number:
                    raise
            else:
                if self.number() == number:
                    return found
        with self.taken():
            return look()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Hold the lock. It may be taken again by its owner."""
        with self._threads:
            if self._depth:
                self._depth += 1
                try:
                    yield
                finally:
                    self._depth -= 1
                return
            descriptor = real.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                self._depth, self._owner = 1, threading.get_ident()
                try:
                    yield
                finally:
                    self._depth = self._owner = 0
                    if self.number() % 2:  # also where a process has died in the middle of a change
                        self._set(self.number() + 1)
            finally:
                real.close(descriptor)
