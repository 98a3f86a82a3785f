"""Waiting with a time limit for what can only be looked at, such as a key in a store or the end of a process."""

from __future__ import annotations

import time
from collections.abc import Iterator

EVERY = 0.05  # seconds; each look may ask another host, or read /proc of every process


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
