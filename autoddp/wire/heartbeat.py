"""What each rank of an attempt writes once a second into a file, so that its launcher knows whether it waits."""

from __future__ import annotations

from autoddp.codec import Struct


class Heartbeat(Struct, frozen=True, forbid_unknown_fields=True):
    """The state of the thread that trains."""

    place: str
    """The thread's place in the script, in words."""
    still: float = 0.0
    """Seconds for which it has stood at this place of the code."""
    waits: float = 0.0
    """Seconds for which it has done nothing but wait for other ranks; 0.0 if it works, or rests of its own accord."""
    joins: bool = False
    """Whether it waits for the end of processes that it has started by `multiprocessing`."""
