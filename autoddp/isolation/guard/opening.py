"""`os.open`, `open` and `io.FileIO`: a real file is opened for reading only."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import threading
from collections.abc import Iterator
from typing import Any

from autoddp.isolation import real
from autoddp.isolation.guard.paths import Descriptor, MalformedPathError, Path, plain, text
from autoddp.isolation.guard.view import Place, View

_real_open = io.open
_RealFileIO = io.FileIO
_TEMPORARY = getattr(os, "O_TMPFILE", 0)
CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
"""Flags with which `os.open` may change something."""


class Announced(threading.local):
    """The path with which this thread is in Python's own `open`.

    Python reports it as an audit event before it calls the guard's opener, so `Audit` must let it pass.
    """

    path: Any = None

    @contextlib.contextmanager
    def by(self, path: Any) -> Iterator[None]:
        """Announce a path for the time of one call."""
        before, self.path = self.path, plain(path)
        try:
            yield
        finally:
            self.path = before


announced = Announced()


class Opening:
    """`os.open`, and those that are built on it."""

    def __init__(self, view: View) -> None:
        self.view = view

    def os_open(self, path: Path, flags: int, mode: int = 0o777, *, dir_fd: Descriptor = None) -> int:
        """`os.open`."""
        name, follow = text(path), not flags & os.O_NOFOLLOW
        if flags & CHANGES:
            return self._open_to_write(name, flags, mode, dir_fd)
        if dir_fd is None and self.view.status_if_plain(name, follow):
            with contextlib.suppress(OSError):  # what follows tells why
                return real.open(name, flags)
        for attempt in range(4):
            number = self.view.lock.number()
            try:
                return real.open(self.view.to_open(self.view.existing(name, follow, dir_fd)).physical, flags)
            except OSError:
                if self.view.lock.number() == number or attempt == 3:
                    raise
        raise AssertionError("unreachable")

    def _open_to_write(self, name: str, flags: int, mode: int, dir_fd: Descriptor) -> int:
        with self.view.lock.held():
            follow = not flags & os.O_NOFOLLOW and flags & (os.O_CREAT | os.O_EXCL) != os.O_CREAT | os.O_EXCL
            if flags & os.O_CREAT and name.endswith("/"):
                self.view.resolve(name.rstrip("/") or "/", follow, dir_fd)  # a missing parent is reported first
                real.fail(errno.EISDIR)
            place = self.view.resolve(name, follow, dir_fd)
            if not place.exists:
                if not flags & os.O_CREAT:
                    real.fail(errno.ENOENT)
                descriptors: list[int] = []
                self.view.make(place, lambda at: descriptors.append(real.open(at, flags, mode)))
                return descriptors[0]
            physical = self._existing(place, flags)
            if place.is_real:  # opened for reading, or no regular file: nothing is created
                flags &= ~os.O_CREAT
            if place.is_file or place.is_folder:
                return real.open(physical, flags, mode)
        return real.open(physical, flags, mode)  # a FIFO may wait for its other end: without the lock

    def _existing(self, place: Place, flags: int) -> str:
        """The path at which to open something that is there, once the script may write to it."""
        if flags & os.O_CREAT and flags & os.O_EXCL:
            real.fail(errno.EEXIST)
        if place.is_folder:
            if not _TEMPORARY or flags & _TEMPORARY != _TEMPORARY:
                real.fail(errno.EISDIR)
            if not place.direct:
                self.view.ensure(self.view.folder(place))
            return self.view.above(place)
        if place.is_link:
            real.fail(errno.ELOOP)
        if not place.is_real or not flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC):
            return place.physical
        if flags & os.O_DIRECTORY:
            real.fail(errno.ENOTDIR)
        self.view.check_content(place)
        return self.view.copy_up(place, content=not flags & os.O_TRUNC)

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
        with announced.by(file):
            return _real_open(file, *args, **kwargs)

    def open_code(self, path: str) -> Any:
        """`io.open_code`, by which Python reads modules."""
        return self.open(path, "rb")

    def file_io(self) -> type:
        """`io.FileIO`. What `open` returns counts as one, although it is of Python's own class."""
        ours = self.opener

        class Kind(type(_RealFileIO)):  # type: ignore[misc]
            def __instancecheck__(cls, instance: Any) -> bool:
                if cls is FileIO:
                    return isinstance(instance, _RealFileIO)
                return bool(super().__instancecheck__(instance))

        class FileIO(_RealFileIO, metaclass=Kind):
            def __init__(self, file: Any, mode: str = "r", closefd: bool = True, opener: Any = None) -> None:
                opener = None if isinstance(file, int) else opener or ours
                with announced.by(file):
                    super().__init__(file, mode, closefd, opener)

        FileIO.__module__ = _RealFileIO.__module__
        FileIO.__qualname__ = "FileIO"
        return FileIO
