"""`os.open`, `open` and `io.FileIO`: a real file is opened for reading only."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from autoddp.isolation.guard import real
from autoddp.isolation.guard.changes import Changes
from autoddp.isolation.guard.paths import MalformedPathError, Path, text
from autoddp.isolation.guard.places import Place

_real_open = io.open
_RealFileIO = io.FileIO
_TEMPORARY = getattr(os, "O_TMPFILE", 0)


class Announced(threading.local):
    """The path with which this thread is in Python's own `open`, which reports it before it asks the guard's opener."""

    path: Any = None

    @contextlib.contextmanager
    def by(self, path: Any) -> Iterator[None]:
        """For the time of one call."""
        before, self.path = self.path, path
        try:
            yield
        finally:
            self.path = before


announced = Announced()


class Opening:
    """`os.open` and those that are built on it."""

    def __init__(self, changes: Changes) -> None:
        self.changes = changes
        self.overlay = changes.overlay
        self.turns = changes.turns

    def os_open(self, path: Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """`os.open`."""
        name = text(path)
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            return self._open_to_write(name, flags, mode, dir_fd)
        if dir_fd is None and self.overlay.as_it_is(name, not flags & os.O_NOFOLLOW):
            with contextlib.suppress(OSError):  # the long way tells why
                return real.open(name, flags)
        for attempt in range(4):
            number = self.turns.number()
            place = self.overlay.resolve(name, not flags & os.O_NOFOLLOW, dir_fd)
            place.found()
            try:
                return real.open(self._to_read(place), flags)
            except OSError:
                if self.turns.number() == number or attempt == 3:
                    raise
        raise AssertionError("unreachable")

    def _to_read(self, place: Place) -> str:
        if place.is_real and place.is_folder and place.physical != place.path:
            # From the descriptor alone the guard must tell the path; the real one has another name.
            with self.turns.taken():
                return self.changes.copy_up(place)
        return place.physical

    def _open_to_write(self, name: str, flags: int, mode: int, dir_fd: int | None) -> int:
        with self.turns.taken():
            follow = not flags & os.O_NOFOLLOW and flags & (os.O_CREAT | os.O_EXCL) != os.O_CREAT | os.O_EXCL
            if flags & os.O_CREAT and name.endswith("/"):
                self.overlay.resolve(name.rstrip("/") or "/", follow, dir_fd)  # a missing parent comes first
                real.fail(errno.EISDIR)
            place = self.overlay.resolve(name, follow, dir_fd)
            if not place.exists:
                return self._create(place, flags, mode)
            physical = self._existing(place, flags)
            if place.is_real:  # to be read, or no regular file: nothing is created
                flags &= ~os.O_CREAT
            if place.is_file or place.is_folder:
                return real.open(physical, flags, mode)
        return real.open(physical, flags, mode)  # a FIFO may wait for its other end: without the lock

    def _create(self, place: Place, flags: int, mode: int) -> int:
        if not flags & os.O_CREAT:
            real.fail(errno.ENOENT)
        descriptors: list[int] = []
        self.changes.make(place, lambda at: descriptors.append(real.open(at, flags, mode)))
        return descriptors[0]

    def _existing(self, place: Place, flags: int) -> str:
        """Where to open something that is there, once the script may write to it."""
        if flags & os.O_CREAT and flags & os.O_EXCL:
            real.fail(errno.EEXIST)
        if place.is_folder:
            if not _TEMPORARY or flags & _TEMPORARY != _TEMPORARY:
                real.fail(errno.EISDIR)
            if not place.through:
                self.changes.ensure(self.overlay.folder(place))
            return self.changes.above(place)
        if place.is_link:
            real.fail(errno.ELOOP)
        if not place.is_real or not flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC):
            return place.physical
        if flags & os.O_DIRECTORY:
            real.fail(errno.ENOTDIR)
        self.changes.check_content(place)
        return self.changes.copy_up(place, content=not flags & os.O_TRUNC)

    def opener(self, path: Any, flags: int) -> int:
        """For Python's own `open`, whose files then keep the name that the script gave."""
        try:
            return self.os_open(path, flags, 0o666)
        except MalformedPathError:
            return real.open(path, flags, 0o666)
        except OSError as error:
            error.filename = path
            raise

    def open(self, file: Any, *args: Any, **kwargs: Any) -> Any:
        """`open` and `io.open`."""
        if isinstance(file, int) or len(args) > 6:
            return _real_open(file, *args, **kwargs)
        if kwargs.get("opener") is None:
            kwargs["opener"] = self.opener
        with announced.by(os.fspath(file) if hasattr(file, "__fspath__") else file):
            return _real_open(file, *args, **kwargs)

    def open_code(self, path: str) -> Any:
        """`io.open_code`, by which Python reads modules."""
        return self.open(path, "rb")

    def file_io(self) -> type:
        """`io.FileIO`. What `open` makes is one as well, although it is of Python's own class."""
        ours: Callable[[Any, int], int] = self.opener

        class Kind(type(_RealFileIO)):  # type: ignore[misc]
            def __instancecheck__(cls, instance: Any) -> bool:
                if cls is FileIO:
                    return isinstance(instance, _RealFileIO)
                return bool(super().__instancecheck__(instance))

        class FileIO(_RealFileIO, metaclass=Kind):
            def __init__(self, file: Any, mode: str = "r", closefd: bool = True, opener: Any = None) -> None:
                if isinstance(file, int):
                    opener = None
                elif opener is None:
                    opener = ours
                with announced.by(os.fspath(file) if hasattr(file, "__fspath__") else file):
                    super().__init__(file, mode, closefd, opener)

        FileIO.__module__ = _RealFileIO.__module__
        FileIO.__qualname__ = "FileIO"
        return FileIO
