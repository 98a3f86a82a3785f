"""The functions of `os` that alter a file in place: its mode, owner, times, length and extended attributes."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import Any

from autoddp.isolation.guard import real
from autoddp.isolation.guard.changes import Changes
from autoddp.isolation.guard.paths import Path, text
from autoddp.isolation.guard.places import Place


class Altering:
    """One method for each function, with its signature. A real file is copied first."""

    def __init__(self, changes: Changes) -> None:
        self.changes = changes
        self.overlay = changes.overlay
        self.turns = changes.turns

    def _alter(self, what: str, place: Place, apply: Callable[[str], Any], content: bool = True) -> None:
        """Change the copy of what is at the place."""
        physical = self.changes.copy_up(place, content)
        if place.is_real:
            self.changes.stop(f"{what} changes {place.path}, which is no regular file")
        self.turns.begin()
        apply(physical)

    def _alter_at(self, name: str, path: Path, dir_fd: int | None, follow: bool, *more: Any, **keywords: Any) -> None:
        function = real.functions[name]
        if isinstance(path, int):
            return self._alter_open(name, path, lambda at: function(at, *more, **keywords))
        with self.turns.taken():
            place = self.overlay.resolve(text(path), follow, dir_fd)
            place.found()
            self.changes.check_owner(place)
            if not follow:
                keywords["follow_symlinks"] = False
            self._alter(f"os.{name}", place, lambda at: function(at, *more, **keywords))

    def _alter_open(self, name: str, descriptor: int, apply: Callable[[Any], Any]) -> None:
        """An open file may be a real one, opened for reading: then its copy is changed."""
        path = real.path_of(descriptor)
        if not path.startswith("/") or path.startswith(self.overlay.scratch + "/") or path.endswith(" (deleted)"):
            apply(descriptor)
            return
        with self.turns.taken():
            place = self.overlay.resolve(path, False)
            if place.through:
                apply(descriptor)
                return
            if place.upper or (place.exists and os.path.samestat(place.found(), real.fstat(descriptor))):
                self.changes.check_owner(place)
                self._alter(f"os.{name}", place, apply)

    def chmod(self, path: Path, mode: int, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> None:
        """`os.chmod`."""
        self._alter_at("chmod", path, dir_fd, follow_symlinks, mode)

    def fchmod(self, fd: int, mode: int) -> None:
        """`os.fchmod`."""
        self._alter_at("chmod", fd, None, True, mode)

    def chown(self, path: Path, uid: int, gid: int, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> None:
        """`os.chown`."""
        self._alter_at("chown", path, dir_fd, follow_symlinks, uid, gid)

    def lchown(self, path: Path, uid: int, gid: int) -> None:
        """`os.lchown`."""
        self._alter_at("chown", path, None, False, uid, gid)

    def fchown(self, fd: int, uid: int, gid: int) -> None:
        """`os.fchown`."""
        self._alter_at("chown", fd, None, True, uid, gid)

    def lchmod(self, path: Path, mode: int) -> None:
        """`os.lchmod`, of macOS."""
        self._alter_at("chmod", path, None, False, mode)

    def chflags(self, path: Path, flags: int, follow_symlinks: bool = True) -> None:
        """`os.chflags`, of macOS."""
        self._alter_at("chflags", path, None, follow_symlinks, flags)

    def lchflags(self, path: Path, flags: int) -> None:
        """`os.lchflags`, of macOS."""
        self._alter_at("chflags", path, None, False, flags)

    def utime(
        self,
        path: Path,
        times: Any = None,
        *,
        ns: Any = None,
        dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        """`os.utime`."""
        given = {"times": times} if ns is None else {"ns": ns}
        self._alter_at("utime", path, dir_fd, follow_symlinks, **given)

    def setxattr(self, path: Path, attribute: Any, value: Any, flags: int = 0, *, follow_symlinks: bool = True) -> None:
        """`os.setxattr`."""
        self._alter_at("setxattr", path, None, follow_symlinks, attribute, value, flags)

    def removexattr(self, path: Path, attribute: Any, *, follow_symlinks: bool = True) -> None:
        """`os.removexattr`."""
        self._alter_at("removexattr", path, None, follow_symlinks, attribute)

    def truncate(self, path: Path, length: int) -> None:
        """`os.truncate`."""
        function = real.functions["truncate"]
        if isinstance(path, int):
            function(path, length)
            return
        with self.turns.taken():
            place = self.overlay.resolve(text(path))
            if stat.S_ISDIR(place.found().st_mode):
                real.fail(errno.EISDIR)
            self.changes.check_content(place)
            self._alter("os.truncate", place, lambda at: function(at, length), content=length != 0)

    def chroot(self, path: Path) -> None:
        """`os.chroot`: nothing would be where the guard looks."""
        self.changes.stop(f"os.chroot to {text(path)}")
