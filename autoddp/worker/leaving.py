"""How a worker of the tuning job ends: at the study's word, with the script's exception, or because the script is over."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from types import TracebackType

from autoddp.worker.link import Link


def watch_the_end(link: Link) -> None:
    """Tell the launcher when the script ends, and with which exception."""
    before = sys.excepthook

    def said(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        link.goodbye(next(iter(f"{kind.__name__}: {error}".splitlines())))
        before(kind, error, trace)

    sys.excepthook = said
    atexit.register(link.goodbye, "")


def leave() -> None:
    """End this process with exit code 0, its data-loading children with it, running nothing more of the script's."""
    for child in multiprocessing.active_children():
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
