"""A lock over all processes of the attempt for changes, and reading without a lock.

A counter in the scratch folder grows with every change. It is odd while a change is between two of its steps; a reader
that sees an odd number takes the lock too, and so waits for some microseconds.
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


class ChangeLock:
    """The lock, and the number of changes so far.

    with lock.held():
        ...                  # no other thread or process changes anything
        lock.begin_change()  # from here on readers wait
        ...
    """

    def __init__(self, scratch: str) -> None:
        self._path = f"{scratch}/lock"
        with real.opened(f"{scratch}/number", os.O_RDWR | os.O_CREAT) as descriptor:
            if real.fstat(descriptor).st_size < 8:
                real.functions["ftruncate"](descriptor, 8)
            self._number = mmap.mmap(descriptor, 8)
        self._threads = threading.RLock()
        self._owner = 0  # the thread that holds the lock
        # No other thread may hold the lock at a fork: the child would keep it for ever.
        release = self._threads.release
        os.register_at_fork(before=self._threads.acquire, after_in_parent=release, after_in_child=release)

    def number(self) -> int:
        """How many changes there were; odd in the middle of one."""
        return int.from_bytes(self._number[:8], "little")

    def _set(self, number: int) -> None:
        self._number[:8] = number.to_bytes(8, "little")

    def begin_change(self) -> None:
        """Readers wait until the lock is given back, and then look folders up again. Called with the lock held."""
        self._set(self.number() | 1)

    def consistent(self, look: Callable[[], T]) -> T:
        """What `look` returns when no change happens meanwhile. It is repeated, and the last time under the lock."""
        if self._owner == threading.get_ident():
            return look()
        for _ in range(3):
            number = self.number()
            if number % 2:
                break
            try:
                found = look()
            except OSError:
                if self.number() == number:
                    raise
            else:
                if self.number() == number:
                    return found
        with self.held():
            return look()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock. The thread that holds it may take it again."""
        with self._threads:
            if self._owner:  # it is this thread, because `_threads` is
                yield
                return
            # Set before the file is opened: that is an audit event, and a check of it may look paths up, which would
            # ask for the lock again.
            self._owner = threading.get_ident()
            try:
                with real.opened(self._path, os.O_RDWR | os.O_CREAT) as descriptor:
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                    try:
                        yield
                    finally:
                        if self.number() % 2:  # also where a process has died in the middle of a change
                            self._set(self.number() + 1)
            finally:
                self._owner = 0
