"""The functions of `os` that change something: what a path names, or a file's mode, owner, times and length.

One method for each function, with its signature.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

from autoddp.isolation import real
from autoddp.isolation.guard.paths import Descriptor, Path, text
from autoddp.isolation.guard.view import BENEATH, GONE, SAME, Place, View


class Writing:
    """Each change happens in the view only, under its lock."""

    def __init__(self, view: View) -> None:
        self.view = view

    def _entry(self, path: Path, dir_fd: Descriptor, must_be_folder: bool = False) -> Place:
        """The place of a name itself, also where it is a symbolic link with a slash behind it."""
        given = text(path)
        place = self.view.resolve(given.rstrip("/") or given, False, dir_fd)
        place.slash = given.endswith("/")
        if must_be_folder and place.slash and place.exists and not place.is_folder:
            real.fail(errno.ENOTDIR)
        return place

    # Making

    def _make(self, path: Path, dir_fd: Descriptor, build: Callable[[str], Any], folder: bool = False) -> None:
        with self.view.lock.held():
            self.view.make(self._free(path, dir_fd, folder), build)

    def _free(self, path: Path, dir_fd: Descriptor, folder: bool = False) -> Place:
        """A place where nothing is yet."""
        place = self._entry(path, dir_fd)
        if place.exists:
            real.fail(errno.EEXIST)
        if place.slash and not folder:
            real.fail(errno.ENOENT)
        return place

    def mkdir(self, path: Path, mode: int = 0o777, *, dir_fd: Descriptor = None) -> None:
        """`os.mkdir`."""
        self._make(path, dir_fd, lambda at: real.mkdir(at, mode), folder=True)

    def symlink(self, src: Path, dst: Path, target_is_directory: bool = False, *, dir_fd: Descriptor = None) -> None:
        """`os.symlink`."""
        target = text(src)
        self._make(dst, dir_fd, lambda at: real.symlink(target, at))

    def mkfifo(self, path: Path, mode: int = 0o666, *, dir_fd: Descriptor = None) -> None:
        """`os.mkfifo`."""
        self._make(path, dir_fd, lambda at: real.functions["mkfifo"](at, mode))

    def mknod(self, path: Path, mode: int = 0o600, device: int = 0, *, dir_fd: Descriptor = None) -> None:
        """`os.mknod`."""
        self._make(path, dir_fd, lambda at: real.functions["mknod"](at, mode, device))

    def link(
        self,
        src: Path,
        dst: Path,
        *,
        src_dir_fd: Descriptor = None,
        dst_dir_fd: Descriptor = None,
        follow_symlinks: bool = not real.LINUX,
    ) -> None:
        """`os.link`. The link of a real file leads to the copy of it, and so does the file's own name from then on."""
        view = self.view
        with view.lock.held():
            source = view.existing(src, follow_symlinks, src_dir_fd)
            target = self._free(dst, dst_dir_fd)
            if source.direct != target.direct:
                real.fail(errno.EXDEV)
            view.check_entries(target)
            if source.is_folder:
                real.fail(errno.EPERM)
            path = view.copy_up(source)
            if source.is_real:
                view.stop(f"os.link of {source.path}, which is no regular file")
            view.make(target, lambda at: real.link(path, at, follow_symlinks=False))

    # Removing

    def unlink(self, path: Path, *, dir_fd: Descriptor = None) -> None:
        """`os.unlink` and `os.remove`."""
        with self.view.lock.held():
            place = self._entry(path, dir_fd, must_be_folder=True)
            place.found()
            self.view.check_removal(place)
            if place.is_folder:
                real.fail(errno.EISDIR if real.LINUX else errno.EPERM)
            if place.direct:
                real.unlink(place.physical)
            else:
                self.view.drop(place)

    def rmdir(self, path: Path, *, dir_fd: Descriptor = None) -> None:
        """`os.rmdir`."""
        with self.view.lock.held():
            place = self._entry(path, dir_fd, must_be_folder=True)
            place.found()
            if place.dot:
                real.fail(errno.EINVAL if place.dot == "." else errno.ENOTEMPTY)
            self.view.check_removal(place)
            if not place.is_folder:
                real.fail(errno.ENOTDIR)
            if place.direct:
                return real.rmdir(place.physical)
            if self.view.names(self.view.folder(place)):
                real.fail(errno.ENOTEMPTY)
            here = self._real_cwd()
            self.view.drop(place)
            if here == place.path:  # the kernel's working directory becomes one that is gone as well
                gone = self.view.aside()
                real.mkdir(gone, 0o700)
                real.chdir(gone)
                real.rmdir(gone)

    def _real_cwd(self) -> str:
        """The kernel's working directory, if that is a real folder; else empty."""
        try:
            here = real.getcwd()
        except FileNotFoundError:
            return ""
        return "" if self.view.in_scratch(here) else here

    # Renaming

    def rename(self, src: Path, dst: Path, *, src_dir_fd: Descriptor = None, dst_dir_fd: Descriptor = None) -> None:
        """`os.rename` and `os.replace`."""
        with self.view.lock.held():
            source, target = self._entry(src, src_dir_fd), self._entry(dst, dst_dir_fd)
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
            self.view.check_removal(source)
            if target.status is None:
                self.view.check_entries(target)
            else:
                self.view.check_removal(target)
                if source.is_folder != target.is_folder:
                    real.fail(errno.ENOTDIR if source.is_folder else errno.EISDIR)
            if source.direct and target.direct:
                real.rename(source.physical, target.physical)
            elif source.direct or target.direct:
                self._move_across(source, target)
            elif source.is_folder:
                self._move_folder(source, target)
            else:
                self._move_file(source, target)

    def _move_file(self, source: Place, target: Place) -> None:
        view = self.view
        if source.is_link:
            view.copy_up(source)
        view.ensure(source.folder)
        view.ensure(target.folder)
        view.lock.begin_change()
        if source.is_real:
            view.mark(view.above(target), SAME + source.physical)
        else:
            real.rename(view.above(source), view.above(target))
        view.hide(source)

    def _move_folder(self, source: Place, target: Place) -> None:
        view = self.view
        if any(root.startswith(source.path + "/") for root in view.direct):
            view.stop(f"os.rename of {source.path}, which holds a folder of autoddp")
        if target.exists and view.names(view.folder(target)):
            real.fail(errno.ENOTEMPTY)
        folder = view.folder(source)
        view.ensure(folder)
        here = self._real_cwd() + "/"
        inside = view.folder(view.resolve(here)) if here.startswith(source.path + "/") else None
        if inside is not None:
            view.ensure(inside)
        if target.exists:
            view.drop(target)
        view.ensure(target.folder)
        view.lock.begin_change()
        old, new = view.above(source), view.above(target)
        with view.times_kept(old):
            view.mark(f"{old}/{BENEATH}", folder.lower or GONE)
        view.clear(new)
        if inside is not None:
            real.chdir(view.upper + inside.path)
        real.rename(old, new)
        view.hide(source)

    def _move_across(self, source: Place, target: Place) -> None:
        """Move a file between a folder where writes are real and one where they are redirected, by a copy."""
        view = self.view
        if not source.is_file:
            real.fail(errno.EXDEV)
        made = f"{target.path}.{os.getpid()}.autoddp" if target.direct else view.aside()
        view.copy_file(source.physical, source.found(), made)
        if target.direct:
            real.rename(made, target.physical)
            view.drop(source)
            return
        view.ensure(target.folder)
        view.lock.begin_change()
        real.rename(made, view.above(target))
        real.unlink(source.physical)

    # Altering a file in place: a real file is copied first

    def _alter(self, name: str, place: Place, apply: Callable[[str], Any], content: bool = True) -> None:
        """Apply a change to the copy of what is at the place."""
        physical = self.view.copy_up(place, content)
        if place.is_real:
            self.view.stop(f"os.{name} changes {place.path}, which is no regular file")
        self.view.lock.begin_change()
        apply(physical)

    def _alter_at(self, name: str, path: Path, dir_fd: Descriptor, follow: bool, *more: Any, **keywords: Any) -> None:
        """Call a function of `os` on the copy of what a path or a descriptor names."""
        function = real.functions[name]
        if isinstance(path, int):
            return self._alter_open(name, path, lambda at: function(at, *more, **keywords))
        with self.view.lock.held():
            place = self.view.existing(path, follow, dir_fd)
            self.view.check_owner(place)
            if not follow:
                keywords["follow_symlinks"] = False
            self._alter(name, place, lambda at: function(at, *more, **keywords))

    def _alter_open(self, name: str, descriptor: int, apply: Callable[[Any], Any]) -> None:
        """An open file may be a real one, opened for reading: then its copy is changed."""
        path = real.path_of(descriptor)
        if not path.startswith("/") or self.view.in_scratch(path) or path.endswith(" (deleted)"):
            apply(descriptor)
            return
        with self.view.lock.held():
            place = self.view.resolve(path, False)
            if place.direct:
                apply(descriptor)
            elif place.upper or (place.exists and os.path.samestat(place.found(), real.fstat(descriptor))):
                self.view.check_owner(place)
                self._alter(name, place, apply)

    def chmod(self, path: Path, mode: int, *, dir_fd: Descriptor = None, follow_symlinks: bool = True) -> None:
        """`os.chmod`."""
        self._alter_at("chmod", path, dir_fd, follow_symlinks, mode)

    def fchmod(self, fd: int, mode: int) -> None:
        """`os.fchmod`."""
        self._alter_at("chmod", fd, None, True, mode)

    def lchmod(self, path: Path, mode: int) -> None:
        """`os.lchmod`, of macOS."""
        self._alter_at("chmod", path, None, False, mode)

    def chown(self, path: Path, uid: int, gid: int, *, dir_fd: Descriptor = None, follow_symlinks: bool = True) -> None:
        """`os.chown`."""
        self._alter_at("chown", path, dir_fd, follow_symlinks, uid, gid)

    def fchown(self, fd: int, uid: int, gid: int) -> None:
        """`os.fchown`."""
        self._alter_at("chown", fd, None, True, uid, gid)

    def lchown(self, path: Path, uid: int, gid: int) -> None:
        """`os.lchown`."""
        self._alter_at("chown", path, None, False, uid, gid)

    def chflags(self, path: Path, flags: int, follow_symlinks: bool = True) -> None:
        """`os.chflags`, of macOS."""
        self._alter_at("chflags", path, None, follow_symlinks, flags)

    def lchflags(self, path: Path, flags: int) -> None:
        """`os.lchflags`, of macOS."""
        self._alter_at("chflags", path, None, False, flags)

    def utime(
        self, path: Path, times: Any = None, *, ns: Any = None, dir_fd: Descriptor = None, follow_symlinks: bool = True
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
        with self.view.lock.held():
            place = self.view.existing(path)
            if place.is_folder:
                real.fail(errno.EISDIR)
            self.view.check_content(place)
            self._alter("truncate", place, lambda at: function(at, length), content=length != 0)

    def chroot(self, path: Path) -> None:
        """`os.chroot`, after which no path would mean what it means to the guard."""
        self.view.stop(f"os.chroot to {text(path)}")
