"""The functions of `os` that make, remove and rename what a path names."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from typing import Any

from autoddp.isolation.guard import real
from autoddp.isolation.guard.changes import Changes
from autoddp.isolation.guard.paths import Path, text
from autoddp.isolation.guard.places import Place
from autoddp.isolation.guard.redirection import BENEATH, GONE


class Changing:
    """One method for each function, with its signature."""

    def __init__(self, changes: Changes) -> None:
        self.changes = changes
        self.overlay = changes.overlay
        self.turns = changes.turns

    def _entry(self, path: Path, dir_fd: int | None, must_be_folder: bool = True) -> Place:
        """The place of a name itself; a slash at its end follows no symbolic link."""
        given = text(path)
        place = self.overlay.resolve(given.rstrip("/") or given, False, dir_fd)
        place.slash = given.endswith("/")
        if must_be_folder and place.slash and place.exists and not place.is_folder:
            real.fail(errno.ENOTDIR)
        return place

    # Making

    def _make(self, path: Path, dir_fd: int | None, build: Callable[[str], Any], folder: bool = False) -> None:
        with self.turns.taken():
            place = self._entry(path, dir_fd, must_be_folder=False)
            if place.exists:
                real.fail(errno.EEXIST)
            if place.slash and not folder:
                real.fail(errno.ENOENT)
            self.changes.make(place, build)

    def mkdir(self, path: Path, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        """`os.mkdir`."""
        self._make(path, dir_fd, lambda at: real.mkdir(at, mode), folder=True)

    def symlink(self, src: Path, dst: Path, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
        """`os.symlink`."""
        target = text(src)
        self._make(dst, dir_fd, lambda at: real.symlink(target, at))

    def mkfifo(self, path: Path, mode: int = 0o666, *, dir_fd: int | None = None) -> None:
        """`os.mkfifo`."""
        self._make(path, dir_fd, lambda at: real.functions["mkfifo"](at, mode))

    def mknod(self, path: Path, mode: int = 0o600, device: int = 0, *, dir_fd: int | None = None) -> None:
        """`os.mknod`."""
        self._make(path, dir_fd, lambda at: real.functions["mknod"](at, mode, device))

    def link(
        self,
        src: Path,
        dst: Path,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = not real.LINUX,
    ) -> None:
        """`os.link`: of a real file, both names get one copy."""
        with self.turns.taken():
            source = self.overlay.resolve(text(src), follow_symlinks, src_dir_fd)
            source.found()
            target = self._entry(dst, dst_dir_fd, must_be_folder=False)
            if target.exists:
                real.fail(errno.EEXIST)
            if target.slash:
                real.fail(errno.ENOENT)
            if source.through != target.through:
                real.fail(errno.EXDEV)
            self.changes.check_entries(target)
            if source.is_folder:
                real.fail(errno.EPERM)
            path = self.changes.copy_up(source)
            if source.is_real:
                self.changes.stop(f"os.link of {source.path}, which is no regular file")
            self.changes.make(target, lambda at: real.link(path, at, follow_symlinks=False))

    # Removing

    def unlink(self, path: Path, *, dir_fd: int | None = None) -> None:
        """`os.unlink` and `os.remove`."""
        with self.turns.taken():
            place = self._entry(path, dir_fd)
            place.found()
            self.changes.check_removal(place)
            if place.is_folder:
                real.fail(errno.EISDIR if real.LINUX else errno.EPERM)
            if place.through:
                real.unlink(place.physical)
            else:
                self.changes.drop(place)

    def rmdir(self, path: Path, *, dir_fd: int | None = None) -> None:
        """`os.rmdir`."""
        with self.turns.taken():
            place = self._entry(path, dir_fd)
            place.found()
            if place.dot:
                real.fail(errno.EINVAL if place.dot == "." else errno.ENOTEMPTY)
            self.changes.check_removal(place)
            if not place.is_folder:
                real.fail(errno.ENOTDIR)
            if place.through:
                return real.rmdir(place.physical)
            if self.overlay.names(self.overlay.folder(place)):
                real.fail(errno.ENOTEMPTY)
            here = self.overlay.cwd() if self._cwd_is_real() else ""
            self.changes.drop(place)
            if here == place.path:
                self._go_nowhere()

    @staticmethod
    def _cwd_exists() -> bool:
        with contextlib.suppress(FileNotFoundError):
            return bool(real.getcwd())
        return False

    def _cwd_is_real(self) -> bool:
        return self._cwd_exists() and not real.getcwd().startswith(self.overlay.scratch + "/")

    def _go_nowhere(self) -> None:
        """The script has removed its working directory; the kernel's becomes one that is gone as well."""
        nowhere = self.changes.aside()
        real.mkdir(nowhere, 0o700)
        real.chdir(nowhere)
        real.rmdir(nowhere)

    # Renaming

    def rename(self, src: Path, dst: Path, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        """`os.rename` and `os.replace`."""
        with self.turns.taken():
            source = self._entry(src, src_dir_fd, must_be_folder=False)
            target = self._entry(dst, dst_dir_fd, must_be_folder=False)
            if source.dot or target.dot or source.folder is None or target.folder is None:
                real.fail(errno.EBUSY)
            status = source.found()
            if not source.is_folder and (source.slash or target.slash):
                real.fail(errno.ENOTDIR)
            if target.path.startswith(source.path + "/"):
                real.fail(errno.EINVAL)
            if source.path.startswith(target.path + "/"):
                real.fail(errno.ENOTEMPTY)
            if source.path == target.path:
                return
            if target.status is not None and not source.is_folder and os.path.samestat(status, target.status):
                return  # two names of one file: the kernel leaves both
            self.changes.check_removal(source)
            if target.status is None:
                self.changes.check_entries(target)
            else:
                self.changes.check_removal(target)
                if source.is_folder != target.is_folder:
                    real.fail(errno.ENOTDIR if source.is_folder else errno.EISDIR)
            self._move(source, target)

    def _move(self, source: Place, target: Place) -> None:
        if source.through and target.through:
            real.rename(source.physical, target.physical)
        elif source.through or target.through:
            self._move_across(source, target)
        elif source.is_folder:
            self._move_folder(source, target)
        else:
            self._move_file(source, target)

    def _move_file(self, source: Place, target: Place) -> None:
        changes = self.changes
        assert source.folder is not None
        assert target.folder is not None
        if source.is_link:
            changes.copy_up(source)
        changes.ensure(source.folder)
        changes.ensure(target.folder)
        self.turns.begin()
        old, new = changes.above(source), changes.above(target)
        if source.is_real:
            changes.same(source, new)
        else:
            real.rename(old, new)
        if changes.hides(source):
            changes.mark(old, GONE)
        else:
            changes.clear(old)

    def _move_folder(self, source: Place, target: Place) -> None:
        changes = self.changes
        assert target.folder is not None
        if any(root.startswith(source.path + "/") for root in self.overlay.roots):
            changes.stop(f"os.rename of {source.path}, which holds a folder of autoddp")
        if target.exists and self.overlay.names(self.overlay.folder(target)):
            real.fail(errno.ENOTEMPTY)
        folder = self.overlay.folder(source)
        changes.ensure(folder)
        here = self.overlay.cwd() + "/" if self._cwd_is_real() else ""
        inside = self.overlay.folder(self.overlay.resolve(here)) if here.startswith(source.path + "/") else None
        if inside is not None:
            changes.ensure(inside)
        if target.exists:
            changes.drop(target)
        changes.ensure(target.folder)
        self.turns.begin()
        old, new = changes.above(source), changes.above(target)
        with changes.times_kept(old):
            changes.mark(f"{old}/{BENEATH}", folder.lower or GONE)
        changes.clear(new)
        if inside is not None:
            real.chdir(self.overlay.upper + inside.path)
        real.rename(old, new)
        if changes.hides(source):
            changes.mark(old, GONE)

    def _move_across(self, source: Place, target: Place) -> None:
        """Between a folder where writes are real and the overlay: a copy, of a file only."""
        changes = self.changes
        if not source.is_file:
            real.fail(errno.EXDEV)
        made = f"{target.path}.{os.getpid()}.autoddp" if target.through else changes.aside()
        changes.copied(source.physical, source.found(), made)
        if target.through:
            real.rename(made, target.physical)
            changes.drop(source)
            return
        assert target.folder is not None
        changes.ensure(target.folder)
        self.turns.begin()
        real.rename(made, changes.above(target))
        real.unlink(source.physical)
