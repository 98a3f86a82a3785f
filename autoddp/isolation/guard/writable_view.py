"""The steps of which every change of the script's view consists. None of them touches a real file.

A step that changes something expects that its caller holds the lock, and calls `begin_change` itself.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

from autoddp.isolation.guard import real
from autoddp.isolation.guard.lock import ChangeLock
from autoddp.isolation.guard.paths import Descriptor, Path
from autoddp.isolation.guard.view import BENEATH, GONE, Folder, Place, View, is_mark

_LARGEST_COPY = 0.2  # of the free space in the scratch folder, for one file: the user's disk must not fill up


class WritableView(View):
    """Copies, hides and replaces, below `upper` only. `stop` ends tuning where that is not possible."""

    def __init__(self, scratch: str, writable: Iterable[str], stop: Callable[[str], NoReturn]) -> None:
        super().__init__(scratch, writable, ChangeLock(scratch))
        self.stop = stop
        self._numbers = itertools.count(time.monotonic_ns())  # a later process may have the number of an earlier one

    def aside(self) -> str:
        """A new path on the same file system, for what is to become visible by a rename."""
        return f"{self.scratch}/aside/{os.getpid()}-{threading.get_ident()}-{next(self._numbers)}"

    def above(self, place: Place) -> str:
        """Where a changed place lies."""
        return place.path if place.direct else self.upper + place.path

    # What the kernel would refuse

    def check_entries(self, place: Place) -> Folder:
        """The folder of a place, if the script may make and remove entries in it."""
        folder = place.folder
        if folder is None:
            real.fail(errno.EBUSY)
        if folder.lower is not None and not folder.direct:
            mine = folder.upper and real.lstat(folder.lower).st_uid == os.geteuid()
            _check(self.upper + folder.path if mine else folder.lower, os.W_OK | os.X_OK)
        return folder

    def check_removal(self, place: Place) -> Folder:
        """As `check_entries`. In a folder like /tmp the entry must be the script's own, too."""
        folder = self.check_entries(place)
        status = folder.place.found()
        me = os.geteuid()
        if status.st_mode & stat.S_ISVTX and me and me not in (status.st_uid, place.found().st_uid):
            real.fail(errno.EPERM)
        return folder

    def check_content(self, place: Place) -> None:
        """Raise if the script may not write into a real file."""
        if place.is_real:
            _check(place.physical, os.W_OK)

    def check_owner(self, place: Place) -> None:
        """Raise if the script may not change the mode or the times of a real file."""
        if place.is_real and os.geteuid() not in (0, place.found().st_uid):
            real.fail(errno.EPERM)
        if place.is_real and real.statvfs(place.physical).f_flag & os.ST_RDONLY:
            real.fail(errno.EROFS)

    # Copying

    @contextlib.contextmanager
    def times_kept(self, folder: str) -> Iterator[None]:
        """What the guard does in a folder of `upper` does not show in the folder's times."""
        before = real.lstat(folder)
        locked = before.st_mode & 0o300 != 0o300 and os.geteuid() != 0
        if locked:
            real.chmod(folder, stat.S_IMODE(before.st_mode) | 0o700)
        try:
            yield
        finally:
            if locked:
                real.chmod(folder, stat.S_IMODE(before.st_mode))
            _set_times(folder, before)

    def ensure(self, folder: Folder | None) -> None:
        """Make sure that a folder is in `upper`, in which the real entries still show. None, above the root, is."""
        if folder is None or folder.upper or folder.direct:
            return
        self.ensure(folder.place.folder)
        path, status = self.upper + folder.path, folder.place.found()
        if real.status_or_none(path) is None:  # else made since the folder was looked up
            self.lock.begin_change()
            with self.times_kept(os.path.dirname(path)):
                made = self.aside()
                real.mkdir(made, 0o700)
                if folder.lower is not None:
                    real.copy_attributes(folder.lower, made)
                real.rename(made, path)  # before it gets its mode: a folder that is not writable cannot be moved
                _copy_status(path, status, 0 if status.st_uid == os.geteuid() else 0o700)
        folder.upper = True

    def real_folder(self, folder: Folder) -> str:
        """Where the kernel finds a folder: the real one if that has the same path, else the one in `upper`."""
        if folder.lower == folder.path:
            return folder.path
        with self.lock.held():
            self.ensure(folder)
        return self.upper + folder.path

    def copy_up(self, place: Place, content: bool = True) -> str:
        """Copy a real file, link or folder to `upper`, and return where it is. Without `content` a file is empty."""
        status = place.found()
        if not place.is_real:
            return place.physical
        if place.is_folder:
            self.ensure(self.folder(place))
        elif place.is_file or place.is_link:
            made = self.aside()
            if place.is_link:
                real.symlink(real.readlink(place.physical), made)
                real.best_effort(lambda: _set_times(made, status))
            else:
                self.copy_file(place.physical, status, made, content)
            self.ensure(place.folder)
            self.lock.begin_change()
            with self.times_kept(os.path.dirname(self.above(place))):
                real.rename(made, self.above(place))
        else:
            return place.physical  # a FIFO, a socket, a device: what is written there is no content of a file
        place.physical, place.upper = self.above(place), True
        place.status = real.lstat(place.physical)
        return place.physical

    def to_open(self, place: Place) -> Place:
        """A place that is about to be looked at by a descriptor, from which the guard must be able to tell its path.

        A real folder under a new name is copied up, because its descriptor would tell the old name.
        """
        if place.is_real and place.is_folder and place.physical != place.path:
            with self.lock.held():
                self.copy_up(place)
        return place

    def status(self, path: Path, follow: bool, dir_fd: Descriptor = None) -> real.Status:
        """The status of what a path names: the same as of a descriptor of it."""
        return self.to_open(self.existing(path, follow, dir_fd)).found()

    def copy_file(self, source: str, status: real.Status, made: str, content: bool = True) -> None:
        """Copy a file to a path that is not visible yet."""
        if content and status.st_size:
            disk = real.statvfs(self.scratch)
            if status.st_blocks * 512 > disk.f_bavail * disk.f_frsize * _LARGEST_COPY:
                self.stop(f"a change of {source}, which would take {status.st_size} bytes of scratch space")
            real.copy_data(source, made)
        else:
            real.create(made)
        real.copy_attributes(source, made)
        _copy_status(made, status)

    # Showing and hiding

    def hides(self, place: Place) -> bool:
        """Whether something real would show at this name if `upper` had nothing there."""
        beneath = place.folder.beneath(place.name) if place.folder and not place.direct else None
        return beneath is not None and real.status_or_none(beneath) is not None

    def mark(self, path: str, target: str) -> None:
        """Put one of the guard's marks at a path of `upper`, over a file or nothing."""
        made = self.aside()
        real.symlink(target, made)
        real.rename(made, path)

    def clear(self, path: str) -> None:
        """Remove a mark, if there is one."""
        if is_mark(real.link_target(path)):
            real.unlink(path)

    def hide(self, place: Place) -> None:
        """Let nothing show at a name at which `upper` has nothing but perhaps a mark."""
        if self.hides(place):
            self.mark(self.above(place), GONE)
        else:
            self.clear(self.above(place))

    def drop(self, place: Place) -> None:
        """Remove a file, a link or an empty folder from the view."""
        self.ensure(place.folder)
        self.lock.begin_change()
        path = self.above(place)
        if place.is_folder and place.upper:
            away = self.aside()
            real.rename(path, away)
            real.remove_tree(away)  # really: it may be the working directory of a process
        elif place.upper and not self.hides(place):
            real.unlink(path)
            return
        self.hide(place)

    def make(self, place: Place, build: Callable[[str], None]) -> None:
        """Let `build` make something at a place where nothing is, given the path to make it at."""
        folder = self.check_entries(place)
        if folder.direct:
            return build(place.path)
        self.ensure(folder)
        path = self.above(place)
        self.lock.begin_change()
        if real.status_or_none(path) is None and not self.hides(place):
            return build(path)
        made = self.aside()
        build(made)
        if stat.S_ISDIR(real.lstat(made).st_mode):
            with self.times_kept(made):
                self.mark(f"{made}/{BENEATH}", GONE)
            self.clear(path)
        real.rename(made, path)


def _check(path: str, mode: int) -> None:
    if not real.allowed(path, mode):
        real.fail(errno.EROFS if real.statvfs(path).f_flag & os.ST_RDONLY else errno.EACCES)


def _set_times(path: str, status: real.Status) -> None:
    real.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)


def _copy_status(path: str, status: real.Status, more: int = 0) -> None:
    """Owner, mode and times as in `status`, as far as this user may set them; `more` is added to the mode."""
    if os.geteuid() == 0:
        real.best_effort(lambda: real.chown(path, status.st_uid, status.st_gid))
    elif status.st_gid != os.getegid():
        real.best_effort(lambda: real.chown(path, -1, status.st_gid))
    real.chmod(path, stat.S_IMODE(status.st_mode) | more)
    _set_times(path, status)
