"""Tells a hang from a long evaluation: touches a file as long as the main thread gets on.

A daemon thread looks at the main thread's stack once a second; as long as it has moved since the last look, the file's
time is renewed. The launcher judges a hang by all ranks' files.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import FrameType

_INTERVAL = 1.0


def start_heartbeat(folder: str, local_rank: int) -> None:
    """Touch `folder/<local_rank>` while the main thread moves."""
    path = os.path.join(folder, str(local_rank))
    main = threading.main_thread().ident
    assert main is not None
    thread = threading.Thread(target=_beat, args=(path, main), name="autoddp-heartbeat", daemon=True)
    thread.start()


def _beat(path: str, main: int) -> None:
    last: tuple[object, ...] = ()
    while True:
        now = _position(sys._current_frames().get(main))
        if now != last:
            with open(path, "w", encoding="utf-8") as file:
                file.write(str(time.time()))
        last = now
        time.sleep(_INTERVAL)


def _position(frame: FrameType | None) -> tuple[object, ...]:
    """Where a thread stands: each frame's code and instruction, innermost first."""
    found: list[object] = []
    while frame is not None:
        found += [id(frame), frame.f_lasti]
        frame = frame.f_back
    return tuple(found)
