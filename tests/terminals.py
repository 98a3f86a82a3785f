"""Terminals of tests' own: what a program writes to one that it takes for the user's."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, list[bytes]]]:
    """A terminal, and what is written to it: all of it when this ends, by when every program that has it must end."""
    ours, theirs = os.openpty()
    written: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the last process has closed the terminal
            while part := os.read(ours, 65536):
                written.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield theirs, written
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)
