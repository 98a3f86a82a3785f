"""Tells the thread that trains from all others, where functions are patched that other threads call too."""

from __future__ import annotations

import os
import threading

_place: tuple[int, int] | None = None
"""The process and the thread that train."""


def training_begins_here() -> None:
    """This thread is the one that trains. Some scripts import torch in one thread and train in another."""
    global _place
    _place = _here()


def training_thread() -> threading.Thread:
    """The thread of this process that trains; until one is known, the main thread."""
    pid, ident = _place or (0, 0)
    here = threading.enumerate() if pid == os.getpid() else ()
    return next((thread for thread in here if thread.ident == ident), threading.main_thread())


def _here() -> tuple[int, int]:
    return os.getpid(), threading.get_ident()


class TrainingThread:
    """True in the thread that trains: the first that makes such an object, until another one begins to train.

    False in other processes: a loader's worker is forked with all patches in place.
    """

    def __init__(self) -> None:
        if _place is None or _place[0] != os.getpid():
            training_begins_here()

    def __bool__(self) -> bool:
        return _here() == _place
