"""No wait is silent: while something is awaited, a line every half a minute says what, if nothing else has said a line.

    with awaiting("the launchers of the other hosts"):          # autoddp: waiting for the launchers …, 27 s so far
        ...
    with awaiting(lambda: f"measuring, {done} steps so far"):   # a function gives the whole line, made when it is shown
        ...

Of several waits inside each other, the innermost one speaks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from autoddp.log import seconds_since_a_line, tell
from autoddp.units import duration

_LONGEST = 25.0  # seconds without a line
_LOOKS = 1.0  # seconds between two looks


@dataclass(eq=False)
class _Wait:
    """One wait; `soon`: seconds without a line until its first one."""

    what: str | Callable[[], str]
    soon: float
    began: float = field(default_factory=time.monotonic)
    has_spoken: bool = False

    def is_due(self, now: float) -> bool:
        limit = _LONGEST if self.has_spoken else self.soon
        return min(seconds_since_a_line(), now - self.began) >= limit or seconds_since_a_line() >= _LONGEST

    def line(self, now: float) -> str:
        if callable(self.what):
            return self.what()
        waited = now - self.began
        return f"waiting for {self.what}" + (f", {duration(waited)} so far" if waited >= 1 else "")


class _Speaker:
    """A thread that speaks for the innermost wait, as long as there is one."""

    def __init__(self) -> None:
        self._waits: list[_Wait] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.current_thread()

    def begins(self, wait: _Wait) -> None:
        with self._lock:
            self._waits.append(wait)
            if len(self._waits) == 1:
                self._over = threading.Event()
                name, arguments = "autoddp-words", (self._over,)
                self._thread = threading.Thread(target=self._speak, args=arguments, name=name, daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # a limit of this user's on memory or threads: the wait itself needs none
                    self._thread = threading.current_thread()

    def ends(self, wait: _Wait) -> None:
        with self._lock:
            self._waits.remove(wait)
            if self._waits:
                return
            self._over.set()
            speaker = self._thread
        if speaker is not threading.current_thread():
            speaker.join(_LOOKS)  # a child that is forked now would find the locks of a line that is half written

    def _speak(self, over: threading.Event) -> None:
        while not over.wait(_LOOKS):
            now = time.monotonic()
            with self._lock:
                wait = self._waits[-1] if self._waits else None
            if wait is not None and wait.is_due(now):
                wait.has_spoken = True
                tell(wait.line(now))


_speaker = _Speaker()


@contextlib.contextmanager
def awaiting(what: str | Callable[[], str], soon: float = _LONGEST) -> Iterator[None]:
    """While the body runs, say what it waits for; the first time after `soon` seconds."""
    wait = _Wait(what, soon)
    _speaker.begins(wait)
    try:
        yield
    finally:
        _speaker.ends(wait)
