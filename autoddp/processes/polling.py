"""Waiting with a time limit: for what can only be looked at, such as the end of a process, and for torch's answers."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, cast

EVERY = 0.05  # seconds; each look may ask another host, or read /proc of every process

T = TypeVar("T")


def polls(limit: float, every: float = EVERY) -> Iterator[float]:
    """Seconds waited so far, again after each `every` seconds; the last time once `limit` seconds have passed.

    >>> for waited in polls(limit=0.2, every=0.1):
    ...     if False:  # what is waited for
    ...         break
    ... else:
    ...     print("it did not come")
    it did not come

    A process that was stopped meanwhile still looks once: what it waits for may have come.
    """
    began, waited = time.monotonic(), 0.0
    while waited <= limit:
        waited = time.monotonic() - began
        yield waited
        time.sleep(every)


class Asked(Generic[T]):
    """A question that a thread asks, so that who waits for the answer heeds signals and can stop waiting.

    A thread that gets no answer stays until the process ends.
    """

    def __init__(self, ask: Callable[[], T]) -> None:
        self._answers: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()
        self._began = time.monotonic()

        def run() -> None:
            try:
                self._answers.put((ask(), None))
            except Exception as error:
                self._answers.put((None, error))

        threading.Thread(target=run, name="autoddp-asks", daemon=True).start()

    @property
    def seconds(self) -> float:
        """Seconds since the question was asked."""
        return time.monotonic() - self._began

    def answer(self, limit: float) -> T:
        """Return the answer, or raise the exception that it is; queue.Empty if none comes within `limit` seconds."""
        found, error = self._answers.get(timeout=limit)
        if error is not None:
            raise error
        return cast(T, found)
