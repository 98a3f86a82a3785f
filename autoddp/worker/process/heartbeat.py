"""Tells the launcher once a second where this rank is, and for how long it has done nothing but wait for other ranks.

    start_heartbeat(folder)        # a daemon thread writes `folder/<rank>`, a `wire.Heartbeat`, again and again

A rank waits for others while three things hold at once:

    - the innermost Python function of the thread that trains is one in which a process waits for others, see
      `_WAITS_IN`: the stack is the process's own record of what it has entered and not left, so that no function has
      to be wrapped for it,
    - the kernel has not run that thread since the last look: a loop of short collectives is no wait,
    - the process and its children use no CPU: a backward pass computes where it later waits for DDP's reduction.

A thread that waits for a GPU may spin. There the GPU itself tells: work that it does not finish waits for other ranks.
Whatever else a rank does counts as its own work, also where it only sleeps. So a mistake of this judgement makes the
launcher wait longer, and never ends what works.

Whoever looks at a stack holds its frames, and a frame that is held keeps its variables when its function returns. So a
look is short, and who counts references waits for its end (`no_frame_is_held`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from autoddp.codec import encode
from autoddp.wire import Heartbeat
from autoddp.wire.started_with import started_with
from autoddp.worker.observe.training_thread import training_thread

_INTERVAL = 1.0
_CLOSER = 3.0  # seconds at one place before the kernel is asked what the rank does: shorter steps are not disturbed
_BUSY = 0.05  # share of one CPU with which a process works
_WAITS_IN = (
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "torch.autograd",  # DDP waits at the end of a backward pass
    "torch.futures",
    "autoddp.worker.process.clock_offset",
    "autoddp.worker.observe.collectives",
    "autoddp.worker.ddp.patch",
    "autoddp.worker.ddp.private",
    "autoddp.worker.ddp.rebuild",
    "autoddp.worker.ddp.wrapped",
    "autoddp.worker.hooks",
    "autoddp.worker.process.rank_store",
)
"""Modules, each with those below it, whose functions call into C to wait for other ranks."""
_JOINS_IN = ("torch.multiprocessing.spawn", "multiprocessing.process")
"""Modules whose `join` waits for the end of processes that the script has started."""
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_NOT_THE_USERS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", _PACKAGE)
_DECORATORS = frozenset(("wrapper", "wrapped", "inner", "inside", "patched", "decorate_context"))
"""Names of functions inside decorators, which say nothing about the script."""
_LONGEST_WAIT = 1.0  # seconds
_TICK = os.sysconf("SC_CLK_TCK")
_look = threading.Lock()
"""Held during a look."""
_device_is_stuck: Callable[[], bool] = bool


def start_heartbeat(folder: str) -> None:
    """Write `folder/<rank>` until this process ends, once it has been told its rank."""
    thread = threading.Thread(target=_beat, args=(folder,), name="autoddp-heartbeat", daemon=True)
    thread.start()


def note_this_process(folder: str) -> None:
    """Leave a file in the folder: autoddp has got into this process, however soon it ends."""
    with contextlib.suppress(OSError):
        open(os.path.join(folder, f"process{os.getpid()}"), "w").close()


def ask_the_device(is_stuck: Callable[[], bool]) -> None:
    """From now on a rank that stands still also waits where `is_stuck` says so, see `device.Backlog`."""
    global _device_is_stuck
    _device_is_stuck = is_stuck


def _beat(folder: str) -> None:
    looks = Looks()
    while True:
        # The disk may be full, or the script may end at this moment; a GPU that has failed raises errors of any kind.
        with contextlib.suppress(Exception):
            text = encode(looks.look())
            with open(os.path.join(folder, started_with("RANK")), "w", encoding="utf-8") as file:
                file.write(text)
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


class Looks:
    """What this process has been seen to do, from look to look."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._position: tuple[object, ...] = ()
        self._place = ""
        self._here_since = self._looked = clock()
        self._activity: _Activity | None = None
        self._waits_since: float | None = None

    def look(self) -> Heartbeat:
        """The state of the thread that trains."""
        now, thread = self._clock(), training_thread()
        with _look:
            frame = sys._current_frames().get(thread.ident or 0)
            position = _position(frame)
            if position != self._position:
                self._place = where(frame)
            may_wait = _is_where_ranks_wait(frame)
            joins = _joins(frame)
            del frame
        if position != self._position:
            self._position, self._here_since, self._activity = position, now, None
        elif now - self._here_since >= _CLOSER:
            before, self._activity = self._activity, _Activity.of(thread)
            rests = before is not None and self._activity.is_rest_since(before, now - self._looked)
            waits = (may_wait and rests) or _device_is_stuck()
            self._waits_since = (self._waits_since or self._looked) if waits else None
        if self._activity is None:
            self._waits_since = None
        self._looked = now
        waited = 0.0 if self._waits_since is None else now - self._waits_since
        return Heartbeat(self._place, round(now - self._here_since, 1), round(waited, 1), joins)


@dataclass(frozen=True)
class _Activity:
    """What the kernel has counted so far."""

    sleeps: bytes
    """How often the thread that trains has begun to sleep, if it sleeps now; b"" if it runs, or where nobody knows."""
    seconds: dict[int, float]
    """Seconds of CPU by process: this one, without the thread that asks, and all that it has started."""

    @classmethod
    def of(cls, thread: threading.Thread) -> _Activity:
        """What the kernel has counted by now."""
        seconds = {0: time.process_time() - time.thread_time()}
        sleeps = b""
        with contextlib.suppress(OSError):  # no Linux, or a sandbox without this part of /proc
            seconds |= {pid: _cpu_of(pid) for pid in descendants("self")}
            # In a process that was forked, Python (before 3.13) still has its parent's number for the main thread.
            number = os.getpid() if thread is threading.main_thread() else thread.native_id
            with open(f"/proc/self/task/{number}/status", "rb") as file:
                status = dict(line.split(b":", 1) for line in file)
            if not status[b"State"].strip().startswith(b"R"):
                sleeps = status[b"voluntary_ctxt_switches"]
        return cls(sleeps, seconds)

    def is_rest_since(self, before: _Activity, elapsed: float) -> bool:
        """Whether the thread has slept and nothing has used CPU in these seconds; False where that is not known."""
        sleeps = self.sleeps == before.sleeps != b""
        used = sum(self.seconds.values()) - sum(before.seconds.values())
        return sleeps and self.seconds.keys() == before.seconds.keys() and used < _BUSY * elapsed


def descendants(process: int | str) -> Iterator[int]:
    """Children of a process, and theirs. OSError where the kernel does not list them."""
    for thread in os.listdir(f"/proc/{process}/task"):
        try:
            with open(f"/proc/{process}/task/{thread}/children", encoding="ascii") as file:
                children = [int(word) for word in file.read().split()]
        except FileNotFoundError:
            if os.path.isdir(f"/proc/{process}/task/{thread}"):
                raise
            continue  # the thread has ended meanwhile
        for child in children:
            yield child
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                yield from descendants(child)


def _cpu_of(process: int) -> float:
    """Seconds of CPU that a process has used; 0.0 if it has ended."""
    try:
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as file:
            after_its_name = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(after_its_name[11]) + int(after_its_name[12])) / _TICK


def _is_where_ranks_wait(frame: FrameType | None) -> bool:
    name = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    return any(name == module or name.startswith(f"{module}.") for module in _WAITS_IN)


def _joins(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "join" and frame.f_globals.get("__name__") in _JOINS_IN:
            return True
        frame = frame.f_back
    return False


def _position(frame: FrameType | None) -> tuple[object, ...]:
    """The position of a thread: each frame and its instruction, innermost first."""
    found: list[object] = []
    while frame is not None:
        found += [id(frame), frame.f_lasti]
        frame = frame.f_back
    return tuple(found)


def _is_internal(function: str) -> bool:
    """Whether a library has that function for itself alone, so that its name says nothing about the script."""
    is_unnamed = function.startswith("<")  # <listcomp>, <lambda>
    return is_unnamed or function in _DECORATORS or (function.startswith("_") and not function.startswith("__"))


def where(frame: FrameType | None) -> str:
    """ "init_process_group, called in train.py, line 31": what the innermost line of the user's own code calls."""
    called = ""
    while frame is not None:
        file = frame.f_code.co_filename
        is_made = file.startswith("<")  # "<string>": by a library, as dataclasses do; "<frozen …": by Python
        if not (is_made or file.startswith(sys.base_prefix + os.sep) or any(part in file for part in _NOT_THE_USERS)):
            place = f"{os.path.basename(file)}, line {frame.f_lineno}"
            return f"{called}, called in {place}" if called else place
        if file.startswith("<frozen importlib"):
            called = "an import"  # Python's own name for it, _find_and_load, tells a user nothing
        elif not file.startswith(_PACKAGE) and not (called and _is_internal(frame.f_code.co_name)):
            called = frame.f_code.co_name
        frame = frame.f_back
    return called or "the interpreter's start"
