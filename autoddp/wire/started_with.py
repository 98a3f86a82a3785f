"""What torchrun told this process in its environment, as it was when the process began.

    keep(began)                     # the environment when the process began, before the script has run
    int(started_with("LOCAL_RANK", "0"))

The script may set these variables to something else before it builds its model: some set LOCAL_RANK to 0 on every rank,
where each rank sees one GPU alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_kept: Mapping[str, str] | None = None


def keep(began: Mapping[str, str]) -> None:
    """Keep this environment, of the moment when the process began."""
    global _kept
    _kept = began


def started_with(name: str, otherwise: str | None = None) -> str:
    """The variable's value when `keep` was called, or now if it was not. KeyError without a value and `otherwise`.

    Under --run-path the process begins without torchrun's variables: elastic sets them a moment later, in the process.
    """
    known = os.environ if _kept is None or name not in _kept else _kept
    return known[name] if otherwise is None else known.get(name, otherwise)


def local_rank() -> int:
    """The number of this process among those that its launcher has started.

    Under --virtual-local-rank torchrun itself tells each of them that it is local rank 0. The folder in which a process
    is to leave its error has its number all the same; in ranks that a script starts by itself, their parent's.
    """
    told = started_with("LOCAL_RANK", "0")
    folder = os.path.basename(os.path.dirname(started_with("TORCHELASTIC_ERROR_FILE", "")))
    return int(folder if told == "0" and folder.isdecimal() else told)
