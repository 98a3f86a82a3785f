"""Writes a file as long as the main thread moves, so that the launcher can tell a hang from a long evaluation.

A daemon thread looks at the main thread's stack once a second. If it has changed since the last look, the thread writes
the file again, with the place in the script at which the main thread is. The launcher looks at the files of all ranks.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from types import FrameType

_INTERVAL = 1.0
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NOT_THE_USERS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", "<frozen ", _PACKAGE)
_DECORATORS = frozenset(("wrapper", "wrapped", "inner", "inside", "decorate_context", "_fn", "_wrapped_call_impl"))
"""Names of functions inside decorators, which say nothing about the script."""


def start_heartbeat(folder: str) -> None:
    """Write `folder/<rank>` while the main thread moves."""
    path = os.path.join(folder, os.environ["RANK"])
    main = threading.main_thread().ident
    assert main is not None
    thread = threading.Thread(target=_beat, args=(path, main), name="autoddp-heartbeat", daemon=True)
    thread.start()


def _beat(path: str, main: int) -> None:
    last: tuple[object, ...] = ()
    while True:
        frame = sys._current_frames().get(main)
        now = _position(frame)
        if now != last:
            with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:  # a full disk, say
                file.write(where(frame))
        last = now
        del frame  # it would keep the script's variables alive
        time.sleep(_INTERVAL)


def _position(frame: FrameType | None) -> tuple[object, ...]:
    """Where a thread stands: each frame's code and instruction, innermost first."""
    found: list[object] = []
    while frame is not None:
        found += [id(frame), frame.f_lasti]
        frame = frame.f_back
    return tuple(found)


def where(frame: FrameType | None) -> str:
    """ "init_process_group, called in train.py, line 31": what the innermost line of the user's own code calls."""
    called = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.startswith(sys.base_prefix + os.sep) or any(part in file for part in _NOT_THE_USERS)):
            place = f"{os.path.basename(file)}, line {frame.f_lineno}"
            return f"{called}, called in {place}" if called else place
        if frame.f_code.co_name not in _DECORATORS or not called:
            called = frame.f_code.co_name
        frame = frame.f_back
    return called or "the interpreter's start"
