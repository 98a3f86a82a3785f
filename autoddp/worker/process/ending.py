"""How a worker of the tuning job ends: when the study is over, with the script's exception, or with the script."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from autoddp.errors import UNHEARD
from autoddp.log import tell
from autoddp.wire import LauncherClient
from autoddp.worker.process.error_file import error_of_the_script
from autoddp.worker.process.gloo_threads import destroy_groups_at_rest

PATIENCE = 8.0  # seconds for the device; twice that is within what the launcher gives to ranks that leave


def watch_the_end(launcher: LauncherClient) -> None:
    """Tell the launcher when the script ends, and with which exception."""
    before = sys.excepthook

    def said(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        launcher.goodbye(in_a_line(error))
        before(kind, error, trace)

    def ended() -> None:  # `said` was not called where the script has put a hook of its own in its place
        error = error_of_the_script()
        launcher.goodbye("" if error is None else in_a_line(error))

    sys.excepthook = said
    atexit.register(ended)


def in_a_line(error: BaseException) -> str:
    """The exception with the first line of its text.

    If that is empty, as in those of `mp.spawn`, the text is another process's traceback: the last line has the error.

    >>> in_a_line(ValueError("no such key\\nlook again")), in_a_line(KeyError())
    ('ValueError: no such key', 'KeyError: ')
    """
    first, *others = str(error).splitlines() or [""]
    told = first.strip() or next((line for line in reversed(others) if line.strip()), "")
    return f"{type(error).__name__}: {told}"


def leave_at_the_end_of_training(launcher: LauncherClient, has_trained: Callable[[], bool]) -> None:
    """A script that destroys its process group trains no more, so this process leaves then, if `has_trained()`.

    Before that a script may destroy a group in which its ranks have only met, to prepare data, and make another one.

    Staying is a risk: where the DDP object outlives the group, its destructor can deadlock with gloo's thread over the
    GIL (torch 2.13), and that would look like a hung trial.
    """
    from torch import distributed

    def leave_after_training(group: Any) -> None:
        if has_trained() and (group is None or group is distributed.GroupMember.WORLD):
            launcher.goodbye("")
            leave()

    destroy_groups_at_rest(leave_after_training)  # at rest as in the launched job


def leave_unless_heard(launcher: LauncherClient) -> None:
    """Introduce this process, which has built a DDP model, to the launcher, or leave."""
    if not launcher.hello():
        if launcher.why_unheard:
            tell(f"this rank cannot reach the launcher: {launcher.why_unheard}")
        leave(UNHEARD if launcher.why_unheard else 0)


def leave(code: int = 0) -> None:
    """End this process, its data-loading children with it, running nothing more of the script's."""
    if "torch" in sys.modules:  # a process may be told to leave before it has imported torch
        from autoddp.worker.process.device import finish_queued_work

        finish_queued_work(PATIENCE)
    for child in multiprocessing.active_children():
        child.terminate()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the script may have closed it, or put an object of its own there
            stream.flush()
    os._exit(code)
