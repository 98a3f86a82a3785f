"""Keeps the logs of a tuning run small: the first 32 MiB and the last 31 MiB of each file are kept.

    with LogKeeper(folder.attempt(0)):
        ...                     # ranks write to <folder>/<job>/attempt_0/<rank>/stdout.log
    ...                         # the logs are plain files of at most 64 MiB now

Elastic gives each rank its log as an open file, so the launcher does not see what is written. While a rank writes, the
file keeps its length and loses its middle: the disk's blocks there are freed (a *hole*), which the writer does not
notice. Where the file system has no holes (NFS, macOS), the head and the newest part are copied to files beside the log
and the log is truncated to nothing; the writer goes on at its own position in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from autoddp.log import get_logger
from autoddp.units import MIB, data_size

logger = get_logger(__name__)

LIMIT = 64 * MIB
"""Largest size of a log."""
HEAD = 32 * MIB
TAIL = 31 * MIB
"""Less than the rest, which also holds the line between the two, and the hole's end up to a whole block."""
_COPIED = 12 * MIB
"""Without holes: what is copied of the newest part before the log is cut."""
_MEANWHILE = 2 * MIB
"""Without holes: what is written during a copy is copied too, if it is no more than this."""
_CATCHING_UP = 2  # times that this is done
_COPY_AT_MOST = _COPIED + _CATCHING_UP * _MEANWHILE
_BLOCK = MIB  # a hole ends at a multiple of it, which is a multiple of the file system's blocks
_SLOWEST, _SLOW, _FASTEST = 1.0, 0.25, 0.02  # seconds between two looks
_SPARE = LIMIT  # bytes that all logs together may grow between two looks
_EFFORT = 50  # a look may take at most one part in 50 of the time
_LOGS = ("stdout.log", "stderr.log")
# elastic's folders, such as 1f2e.tune0_x7k2/attempt_0/3: the job's name is ours, see `elastic`
_JOBS, _STARTS, _RANKS = re.compile(r".+\.[a-z]+\d+_.+"), re.compile(r"attempt_\d+"), re.compile(r"\d+")


class LogKeeper:
    """A thread that looks at the logs in an attempt's folder, at most every 20 ms and at least once a second.

    Not promised: that a log never exceeds the limit. It does by what is written between two looks, some hundred MiB
    from a process that begins to write as fast as it can. It never raises: a log that cannot be kept small is left.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._logs: dict[Path, _Log] = {}
        self._over = threading.Event()
        self._one_at_a_time = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="autoddp-logs", daemon=True)

    def __enter__(self) -> LogKeeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.settle()

    def settle(self) -> None:
        """Make each log a plain file of at most 64 MiB: head, a line that says how much is left out, and tail.

        Only for writers that have ended: what one writes from then on may be lost.
        """
        with self._one_at_a_time:
            for path in _found(self._folder):
                with contextlib.suppress(OSError):
                    self._log(path).settle()

    def look(self) -> int:
        """Make room in the logs that are too large; the sum of all sizes, of which much may be holes."""
        total = 0
        with self._one_at_a_time:
            for path in _found(self._folder):
                with contextlib.suppress(OSError):
                    total += self._log(path).bound()
        return total

    def _log(self, path: Path) -> _Log:
        return self._logs.setdefault(path, _Log(path))

    def _watch(self) -> None:
        wait, before, began = _FASTEST, 0, time.perf_counter()
        while not self._over.wait(wait):
            now = time.perf_counter()
            try:
                total = self.look()
            except Exception:
                logger.exception("the logs of this run are not kept small any more")
                return
            took, since = time.perf_counter() - now, now - began
            idle = min(max(_SLOW, _EFFORT * took), _SLOWEST)
            growth = max(0, total - before) / since
            wait = max(_FASTEST, min(idle, _SPARE / growth)) if growth else idle
            before, began = total, now


@dataclass
class _Log:
    """One log, and what was taken out of it so far."""

    path: Path
    inode: int = 0
    hole: int = HEAD
    """Position at which the hole ends; it begins after the head."""
    cut: bool = False
    """Without holes: whether the log was cut, which is: its head and newest part copied, and its length set to 0."""
    begin: int = 0
    """Without holes: the position in the log after which everything was written since the cut."""
    before: int = 0
    """Without holes: bytes that had been written before the cut."""
    lost: int = 0
    """Without holes: bytes that were written after the last copy and before the cut."""
    skipped: tuple[int, bytes] = (0, b"")
    """Without holes: bytes that the last copy leaves out shortly before its end, and the line there that says so."""
    zeros: bool = False
    """Without holes: whether the copy may begin with zeros, in place of what an earlier cut lost."""

    def bound(self) -> int:
        """Make room if the log is too large; its size."""
        size = self._size()
        kept = HEAD + _COPY_AT_MOST + size - self.begin if self.cut else HEAD + size - self.hole
        if kept > LIMIT:
            with self._opened() as file:
                if self.cut or not self._punch(file, size):
                    self._cut(file)
        return size

    def settle(self) -> None:
        """Head, line and tail in a plain file, if it is more than the limit otherwise."""
        size = self._size()
        if self.cut:
            with self._opened() as file:
                self._join(file, size)
        elif size > LIMIT:
            with self._opened() as file:
                end = _line(size - HEAD - TAIL) + os.pread(file, TAIL, size - TAIL)
                done = 0
                while done < len(end):
                    done += os.pwrite(file, end[done:], HEAD + done)
                os.ftruncate(file, HEAD + len(end))
        self._forget(0)

    def _size(self) -> int:
        found = os.stat(self.path, follow_symlinks=False)
        if not _is_ours(found):
            raise FileNotFoundError(self.path)
        if found.st_ino != self.inode:  # another file under the same name
            self._forget(found.st_ino)
        if self.begin and found.st_size and (found.st_size < self.begin or self._starts_anew()):
            self.begin = 0  # its writer appends, at the end that the log has now
        return max(found.st_size, self.begin)

    def _starts_anew(self) -> bool:
        """Whether the writer appends to a log that was cut: its text then stands at the start.

        A writer that keeps its own position leaves zeros there. The size does not tell: one that appends may have
        written as much again since the last look.
        """
        with self._opened() as file:
            return bool(os.pread(file, min(self.begin, 4096), 0).strip(b"\0"))

    def _forget(self, inode: int) -> None:
        """Begin anew with another file; its inode is 0 where it is not known yet."""
        self.inode, self.hole, self.cut, self.begin, self.before, self.lost = inode, HEAD, False, 0, 0, 0
        self.zeros, self.skipped = False, (0, b"")

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        file = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not _is_ours(os.fstat(file)):
                raise FileNotFoundError(self.path)
            yield file
        finally:
            os.close(file)

    def _punch(self, file: int, size: int) -> bool:
        """Widen the hole up to the tail; False where the file system has no holes."""
        end = (size - TAIL) // _BLOCK * _BLOCK
        if not _punch_hole(file, self.hole, end - self.hole):
            return False
        self.hole = end
        return True

    def _cut(self, file: int) -> None:
        size = os.fstat(file).st_size
        if not self.cut:
            _copy(file, 0, HEAD, self._beside(".head"))
            size = os.fstat(file).st_size
        self.skipped = (0, b"")
        # a copy that fails half-way, as on a full disk, must not replace the last one
        copied = _copy(file, max(self.begin, size - _COPIED), size, self._beside(".next"))
        for _ in range(_CATCHING_UP):
            size = os.fstat(file).st_size
            if size - copied > _MEANWHILE:
                # Its writer is as fast as the copy: to lose a part is better than to fill the disk. The end is kept,
                # since a rank that fails says there why.
                skipped = size - _MEANWHILE - copied
                with open(self._beside(".next"), "ab") as copy:
                    copy.write(_line(skipped))
                self.skipped = (skipped, _line(skipped))
                copied = _copy(file, size - _MEANWHILE, size, self._beside(".next"), os.O_APPEND)
                break
            copied = _copy(file, copied, size, self._beside(".next"), os.O_APPEND)
        os.replace(self._beside(".next"), self._beside(".tail"))
        end = os.fstat(file).st_size
        os.ftruncate(file, 0)
        self.before += end - self.begin
        self.zeros = self.cut and self.begin > 0
        self.cut, self.begin, self.lost = True, end, end - copied

    def _join(self, file: int, size: int) -> None:
        tail = newest = os.pread(file, TAIL, max(self.begin, size - TAIL))
        left_out = self.before + size - self.begin - HEAD
        if len(newest) < TAIL:
            # what was written after the last copy and before the cut is lost; where it was, zeros are read
            newest = newest.lstrip(b"\0") if self.begin else newest
            lost = self.lost + len(tail) - len(newest)
            copied = self._beside(".tail").read_bytes()
            copied = (copied.lstrip(b"\0") if self.zeros else copied)[len(newest) - TAIL :]
            tail = copied + (_line(lost) if lost else b"") + newest
            left_out -= len(copied) + lost
            skipped, mark = self.skipped
            if mark and mark in copied:  # the line there says of these bytes that they are left out
                left_out -= skipped - len(mark)
        with open(self._beside(".head"), "ab") as whole:
            whole.truncate(HEAD)
            whole.write(_line(left_out - len(newest)) + tail)
        os.replace(self._beside(".head"), self.path)
        self._beside(".tail").unlink()

    def _beside(self, ending: str) -> Path:
        return self.path.with_name(self.path.name + ending)


def _is_ours(found: os.stat_result) -> bool:
    """Whether it is a plain file of this user's without a second name, by which it might be the script's."""
    return stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid()


def _line(left_out: int) -> bytes:
    return f"\n[autoddp: {data_size(left_out)} left out here]\n".encode()


def _found(folder: Path) -> Iterator[Path]:
    """NCCL's and elastic's logs in the folder, and each rank's. The script's own files are elsewhere."""
    yield from (Path(entry) for entry in _entries(folder) if entry.name.endswith(".log"))
    for job in _folders(folder, _JOBS):
        for start in _folders(job, _STARTS):
            for rank in _folders(start, _RANKS):
                yield from (Path(entry) for entry in _entries(rank) if entry.name in _LOGS)


def _folders(folder: str | Path, names: re.Pattern[str]) -> list[str]:
    return [e.path for e in _entries(folder) if names.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _copy(file: int, begin: int, end: int, path: Path, how: int = os.O_TRUNC) -> int:
    """Copy a part of a file to another one; where in the first one the copy ends."""
    copy = os.open(path, os.O_WRONLY | os.O_CREAT | how | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        while begin < end and (part := os.pread(file, min(MIB, end - begin), begin)):
            begin += os.write(copy, part)
    finally:
        os.close(copy)
    return begin


def _hole_puncher() -> Callable[[int, int, int, int], int] | None:
    library = ctypes.CDLL(None, use_errno=True)
    # macOS has neither name, and musl has no second one
    fallocate = getattr(library, "fallocate64", None) or getattr(library, "fallocate", None)
    if fallocate is not None:
        fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return fallocate


_fallocate = _hole_puncher()
_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02


def _punch_hole(file: int, begin: int, length: int) -> bool:
    return _fallocate is not None and _fallocate(file, _KEEP_SIZE_AND_PUNCH_HOLE, begin, length) == 0
