"""Tells a hang from a long evaluation, and where a rank is: a file that is written while the main thread gets on.

A daemon thread looks at the main thread's stack once a second. As long as it has moved since the last look, the file's
time is renewed; the file says where in the script the thread is. The launcher judges a hang by all ranks' files.
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
"""Names that functions have inside decorators; they tell nobody anything."""


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
