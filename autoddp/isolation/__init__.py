"""Floor 1. Keeps a tuning run from changing anything that the user owns.

    overlay      the attempt runs in a mount namespace of its own: reads are real, writes vanish with the namespace
    guard        where the host allows no namespace: Python's path operations follow an overlay kept in a scratch
                 folder, and what that cannot cover ends tuning before it happens
    off          nothing is isolated, as under torchrun

`Level` names the three. At each of the first two, `elsewhere` ends tuning before the script changes anything on another
machine. `caches` keeps what one attempt has cached for the next, `trackers` switches experiment trackers off, `ports`
knows which ports the job has to wait for, `locks` which locks other programs hold, and `mps` whether a daemon shares
the GPUs among processes.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["Level"]


class Level(Enum):
    """How a tuning attempt is kept away from the user's files; a value is the word of `--isolation`."""

    OVERLAY = "overlay"
    """A mount namespace with a copy-on-write overlay over all that the script can write."""
    GUARD = "guard"
    """Path operations of Python are redirected; what that does not cover ends tuning before it happens."""
    OFF = "off"
    """No isolation: what the script writes while it is being tuned stays."""
