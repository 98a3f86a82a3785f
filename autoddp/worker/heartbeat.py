"""Writes a file as long as the main thread moves, so that the launcher can tell a hang from a long evaluation.

A daemon thread looks at the main thread's stack once a second. If it has changed since the last look, the thread writes
the file again, with the place in the script at which the main thread is. The launcher looks at the files of all ranks.

Whoever looks at a stack holds its frames, and a frame that is held keeps its variables when its function returns. So a
look is short, and who counts references waits for its end (`no_frame_is_held`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

_INTERVAL = 1.0
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NOT_THE_USERS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", "<frozen ", _PACKAGE)
_DECORATORS = frozenset(("wrapper", "wrapped", "inner", "inside", "decorate_context", "_fn", "_wrapped_call_impl"))
"""Names of functions inside decorators, which say nothing about the script."""
_LONGEST_WAIT = 1.0  # seconds
_look = threading.Lock()
"""Held during a look."""


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
        with _look:
            frame = sys._current_frames().get(main)
            now = _position(frame)
            place = where(frame) if now != last else ""
            del frame
        if place:
            with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:  # a full disk, say
                file.write(place)
        last = now
        time.sleep(_INTERVAL)


@contextlib.contextmanager
def no_frame_is_held() -> Iterator[None]:
    """Inside, the heartbeat keeps no variable of a function that has returned. A count of references is true there.

    The wait has an end, because letting go of frames may run finalizers of the script, which may wait for this thread.
    """
    has_lock = _look.acquire(timeout=_LONGEST_WAIT)
    try:
        yield
    finally:
        if has_lock:
            _look.release()


def _make_lock() -> None:
    global _look
    _look = threading.Lock()


os.register_at_fork(after_in_child=_make_lock)  # the parent's heartbeat may look just now, and the child has none


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
