"""What torchrun told this process in its environment, as it was when the process began.

    keep()                          # before the script runs
    int(started_with("LOCAL_RANK", "0"))

The script may set these variables to something else before it builds its model: some set LOCAL_RANK to 0 on every rank,
where each rank sees one GPU alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_kept: Mapping[str, str] | None = None


def keep() -> None:
    """Keep the environment as it is now."""
    global _kept
    _kept = dict(os.environ)


def started_with(name: str, otherwise: str | None = None) -> str:
    """The variable's value when `keep` was called, or now if it was not. KeyError without a value and `otherwise`."""
    known = os.environ if _kept is None else _kept
    return known[name] if otherwise is None else known.get(name, otherwise)
