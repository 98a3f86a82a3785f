"""The three levels of isolation, best first."""

from __future__ import annotations

from enum import Enum


class Level(Enum):
    """How a tuning attempt is kept away from the user's files; a value is the word of `--isolation`."""

    OVERLAY = "overlay"
    """A mount namespace with a copy-on-write overlay over all that the script can write."""
    GUARD = "guard"
    """Path operations of Python are redirected; whatever that does not cover ends tuning before it happens."""
    OFF = "off"
    """No isolation: what the script writes while it is being tuned stays."""
