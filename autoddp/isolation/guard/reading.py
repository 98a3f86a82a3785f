"""The functions of `os` that look and change nothing, and those of the working directory.

One method for each function, with its signature.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from autoddp.isolation import real
from autoddp.isolation.guard.paths import Descriptor, Path, like
from autoddp.isolation.guard.view import Folder, View


class Reading:
    """Looks things up in the view."""

    def __init__(self, view: View) -> None:
        self.view = view

    def stat(self, path: Path, *, dir_fd: Descriptor = None, follow_symlinks: bool = True) -> real.Status:
        """`os.stat`."""
        if isinstance(path, int):
            return real.stat(path)
        plain = self.view.status_if_plain(path, follow_symlinks)
        return plain or self.view.status(path, follow_symlinks, dir_fd)

    def lstat(self, path: Path, *, dir_fd: Descriptor = None) -> real.Status:
        """`os.lstat`."""
        return self.view.status_if_plain(path, False) or self.view.status(path, False, dir_fd)

    def access(
        self,
        path: Path,
        mode: int,
        *,
        dir_fd: Descriptor = None,
        effective_ids: bool = False,
        follow_symlinks: bool = True,
    ) -> bool:
        """`os.access`."""
        try:
            place = self.view.resolve(path, follow_symlinks, dir_fd)
            if not place.exists:
                return False
            places = [place.physical]
            if place.upper and place.is_folder:  # its owner here is this user, who may not own the real one
                lower = self.view.folder(place).lower
                if lower is not None and real.lstat(lower).st_uid != os.geteuid():
                    places.append(lower)
        except OSError:
            return False
        more = {"effective_ids": True} if effective_ids else {}
        return all(real.access(each, mode, **more) for each in places)

    def _folder(self, path: Path) -> Folder:
        if isinstance(path, int):
            return self.view.folder(self.view.resolve(self.view.folder_of(path)))
        return self.view.folder(self.view.existing(path))

    def listdir(self, path: Path = None) -> list[Any]:
        """`os.listdir`."""
        given = "." if path is None else path
        names = self.view.lock.consistent(lambda: self.view.names(self._folder(given)))
        return [like(given, name) for name in names]

    def scandir(self, path: Path = None) -> Entries:
        """`os.scandir`."""
        given = "." if path is None else path

        def look() -> tuple[Folder, dict[str, os.DirEntry[str] | None]]:
            folder = self._folder(given)
            return folder, self.view.names(folder)

        folder, names = self.view.lock.consistent(look)
        return Entries(Entry(self.view, given, folder.child_path(name), name, entry) for name, entry in names.items())

    def readlink(self, path: Path, *, dir_fd: Descriptor = None) -> Any:
        """`os.readlink`."""
        place = self.view.existing(path, False, dir_fd)
        if not place.is_link:
            real.fail(errno.EINVAL)
        return like(path, self.view.virtual(real.readlink(place.physical)))

    def _on_disk(self, path: Path) -> Path:
        """Something real on the file system on which the script believes the path to be; or the open descriptor."""
        if isinstance(path, int):
            return path
        place = self.view.existing(path)
        if not place.upper:
            return place.physical
        folder = place.folder
        while folder is not None and folder.lower is None:
            folder = folder.place.folder
        return "/" if folder is None else folder.lower

    def statvfs(self, path: Path) -> os.statvfs_result:
        """`os.statvfs`."""
        return real.statvfs(self._on_disk(path))

    def pathconf(self, path: Path, name: Any) -> int:
        """`os.pathconf`."""
        return int(real.functions["pathconf"](self._on_disk(path), name))

    def getxattr(self, path: Path, attribute: Any, *, follow_symlinks: bool = True) -> bytes:
        """`os.getxattr`."""
        return bytes(self._attributes("getxattr", path, follow_symlinks, attribute))

    def listxattr(self, path: Path = None, *, follow_symlinks: bool = True) -> list[str]:
        """`os.listxattr`."""
        return list(self._attributes("listxattr", "." if path is None else path, follow_symlinks))

    def _attributes(self, name: str, path: Path, follow: bool, *more: Any) -> Any:
        if isinstance(path, int):
            return real.functions[name](path, *more)
        place = self.view.existing(path, follow)
        return real.functions[name](place.physical, *more, follow_symlinks=False)

    # The kernel's working directory is the real folder if the script sees it under the same path: native libraries then
    # find the real files. Else it is the folder in `upper`, from whose path `View.cwd` tells the script's.

    def chdir(self, path: Path) -> None:
        """`os.chdir`."""
        real.chdir(self.view.real_folder(self._folder(path)))

    def fchdir(self, fd: int) -> None:
        """`os.fchdir`."""
        self.chdir(fd if isinstance(fd, int) else fd.fileno())

    def getcwd(self) -> str:
        """`os.getcwd`."""
        path = self.view.cwd()
        self.view.existing(path)
        return path

    def getcwdb(self) -> bytes:
        """`os.getcwdb`."""
        return os.fsencode(self.getcwd())


class Entries(Iterator["Entry"]):
    """What `os.scandir` returns."""

    def __init__(self, entries: Iterator[Entry]) -> None:
        self._entries = entries

    def __next__(self) -> Entry:
        return next(self._entries)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Yield nothing more."""
        self._entries = iter(())


class Entry:
    """Stands in for `os.DirEntry`, which cannot be made from Python. Its methods are those of `os.DirEntry`."""

    __class_getitem__ = classmethod(lambda cls, item: cls)

    def __init__(self, view: View, given: Path, seen: str, name: str, entry: os.DirEntry[str] | None) -> None:
        self._view, self._seen, self._entry = view, seen, entry
        self._status: dict[bool, real.Status] = {}
        self.name = like(given, name)
        self.path = self.name if isinstance(given, int) else os.path.join(given, self.name)

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> real.Status:
        """Looked up once."""
        if follow_symlinks not in self._status:
            try:
                self._status[follow_symlinks] = self._view.status(self._seen, follow_symlinks)
            except OSError as error:
                error.filename = self.path
                raise
        return self._status[follow_symlinks]

    def inode(self) -> int:
        """The number that the file system has for it."""
        return self.stat(follow_symlinks=False).st_ino if self._entry is None else self._entry.inode()

    def is_symlink(self) -> bool:
        """Whether it is a symbolic link."""
        return False if self._entry is None else self._entry.is_symlink()

    def is_junction(self) -> bool:
        """False: there are no junctions outside Windows."""
        return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a folder."""
        return self._is(stat.S_ISDIR, "is_dir", follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a regular file."""
        return self._is(stat.S_ISREG, "is_file", follow_symlinks)

    def _is(self, kind: Callable[[int], bool], name: str, follow: bool) -> bool:
        if self._entry is not None and not self._entry.is_symlink():
            return bool(getattr(self._entry, name)(follow_symlinks=False))
        with contextlib.suppress(FileNotFoundError):
            return kind(self.stat(follow_symlinks=follow).st_mode)
        return False
