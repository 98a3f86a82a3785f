"""The steps of which every change of the script's view is made. None of them touches a real file.

Each one that changes something expects that the caller holds the lock, and calls `begin` itself.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from autoddp.isolation.guard import real
from autoddp.isolation.guard.places import Folder, Place
from autoddp.isolation.guard.redirection import BENEATH, GONE, SAME, Overlay, is_ours

_MOST_OF_FREE = 0.2  # of what is free in the scratch, for one copied file: the user's disk must not fill up


class Changes:
    """Copies up, hides and replaces, below `overlay.upper` only."""

    def __init__(self, overlay: Overlay, stop: Callable[[str], NoReturn]) -> None:
        self.overlay = overlay
        self.stop = stop
        self.turns = overlay.turns
        self._numbers = itertools.count(time.monotonic_ns())  # a later process may have the number of an earlier one

    def aside(self) -> str:
        """A new path on the same file system, for what becomes visible by a rename."""
        return f"{self.overlay.scratch}/aside/{os.getpid()}-{threading.get_ident()}-{next(self._numbers)}"

    def above(self, place: Place) -> str:
        """Where a changed place lies."""
        return place.path if place.through else self.overlay.upper + place.path

    # What the kernel would refuse

    def check_entries(self, place: Place) -> Folder:
        """The folder of a place, if the script may make and remove entries in it."""
        folder = place.folder
        if folder is None:
            real.fail(errno.EBUSY)
        if folder.through:
            return folder
        if folder.lower is not None:
            mine = folder.upper and real.lstat(folder.lower).st_uid == os.geteuid()
            self._check(self.overlay.upper + folder.path if mine else folder.lower, os.W_OK | os.X_OK)
        return folder

    def check_removal(self, place: Place) -> Folder:
        """As `check_entries`, and in a folder like /tmp the entry must be the script's own."""
        folder = self.check_entries(place)
        status = folder.place.found()
        me = os.geteuid()
        if status.st_mode & stat.S_ISVTX and me and me not in (status.st_uid, place.found().st_uid):
            real.fail(errno.EPERM)
        return folder

    def check_content(self, place: Place) -> None:
        """Whether the script may write into a real file."""
        if place.is_real:
            self._check(place.physical, os.W_OK)

    def check_owner(self, place: Place) -> None:
        """Whether the script may change the mode or the times of a real file."""
        if place.is_real and os.geteuid() not in (0, place.found().st_uid):
            real.fail(errno.EPERM)
        if place.is_real and real.statvfs(place.physical).f_flag & os.ST_RDONLY:
            real.fail(errno.EROFS)

    def _check(self, path: str, mode: int) -> None:
        if not real.allowed(path, mode):
            read_only = real.statvfs(path).f_flag & os.ST_RDONLY
            real.fail(errno.EROFS if read_only else errno.EACCES)

    # Making room in `upper`

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
            real.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))

    def ensure(self, folder: Folder) -> None:
        """Have a folder in `upper`, to which the real one's entries still belong."""
        if folder.upper or folder.through:
            return
        parent = folder.place.folder
        assert parent is not None
        self.ensure(parent)
        path, status = self.overlay.upper + folder.path, folder.place.found()
        if real.status_or_none(path) is not None:  # made since the folder was looked up
            folder.upper = True
            return
        self.turns.begin()
        with self.times_kept(self.overlay.upper + parent.path):
            made = self.aside()
            real.mkdir(made, 0o700)
            if folder.lower is not None:
                real.copy_attributes(folder.lower, made)
            real.rename(made, path)  # before it gets its mode: a folder that is not writable cannot be moved
            self._like(path, status, 0 if status.st_uid == os.geteuid() else 0o700)
        folder.upper = True

    @staticmethod
    def _like(path: str, status: real.Status, more: int = 0) -> None:
        if os.geteuid() == 0:
            real.best_effort(lambda: real.chown(path, status.st_uid, status.st_gid))
        elif status.st_gid != os.getegid():
            real.best_effort(lambda: real.chown(path, -1, status.st_gid))
        real.chmod(path, stat.S_IMODE(status.st_mode) | more)
        real.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def copy_up(self, place: Place, content: bool = True) -> str:
        """Have the thing at a place in `upper`, and say where. Without `content` a file is empty there."""
        status = place.found()
        if not place.is_real:
            return place.physical
        if place.is_folder:
            self.ensure(self.overlay.folder(place))
        elif place.is_file or place.is_link:
            self._copy(place, status, content)
        else:
            return place.physical  # a FIFO, a socket, a device: what is written there is no content of a file
        place.physical, place.upper = self.above(place), True
        place.status = real.lstat(place.physical)
        return place.physical

    def _copy(self, place: Place, status: real.Status, content: bool) -> None:
        assert place.folder is not None
        made = self.aside()
        if place.is_link:
            real.symlink(real.readlink(place.physical), made)
            real.best_effort(
                lambda: real.utime(made, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)
            )
        else:
            self.copied(place.physical, status, made, content)
        self.ensure(place.folder)
        self.turns.begin()
        with self.times_kept(self.overlay.upper + place.folder.path):
            real.rename(made, self.above(place))

    def copied(self, source: str, status: real.Status, made: str, content: bool = True) -> None:
        """A copy of a file that is not visible yet."""
        if content and status.st_size:
            disk = real.statvfs(self.overlay.scratch)
            if status.st_blocks * 512 > disk.f_bavail * disk.f_frsize * _MOST_OF_FREE:
                self.stop(f"a change of {source}, which would take {status.st_size} bytes of scratch space")
            real.copy_data(source, made)
        else:
            real.close(real.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        real.copy_attributes(source, made)
        self._like(made, status)

    # Showing and hiding

    def hides(self, place: Place) -> bool:
        """Whether something real shows at this name once `upper` has nothing there."""
        beneath = place.folder.beneath(place.name) if place.folder and not place.through else None
        return beneath is not None and real.status_or_none(beneath) is not None

    def mark(self, path: str, target: str) -> None:
        """Put one of the overlay's own marks at a path of `upper`, over a file or nothing."""
        made = self.aside()
        real.symlink(target, made)
        real.rename(made, path)

    def clear(self, path: str) -> None:
        """Take a mark away; something else follows at once."""
        if is_ours(real.link_target(path)):
            real.unlink(path)

    def drop(self, place: Place) -> None:
        """Remove what is there from the view: a file, a link or an empty folder."""
        assert place.folder is not None
        self.ensure(place.folder)
        self.turns.begin()
        path = self.above(place)
        if place.is_folder and place.upper:
            away = self.aside()
            real.rename(path, away)
            self.forget(away)
        elif place.upper and not self.hides(place):
            real.unlink(path)
            return
        if self.hides(place):
            self.mark(path, GONE)
        else:
            self.clear(path)

    def forget(self, away: str) -> None:
        """Remove a folder that was put aside. Below the working directory of a process it must be really gone."""
        real.remove_tree(away)

    def conceal(self, folder: str) -> None:
        """Let nothing real show through a folder of `upper`."""
        with self.times_kept(folder):
            self.mark(f"{folder}/{BENEATH}", GONE)

    def make(self, place: Place, build: Callable[[str], None]) -> None:
        """Let `build` make something at a place where nothing is, given the path to make it at."""
        folder = self.check_entries(place)
        if folder.through:
            return build(place.path)
        self.ensure(folder)
        path = self.above(place)
        self.turns.begin()
        if real.status_or_none(path) is None and not self.hides(place):
            return build(path)
        made = self.aside()
        build(made)
        if stat.S_ISDIR(real.lstat(made).st_mode):
            self.conceal(made)
            self.clear(path)
        real.rename(made, path)

    def same(self, source: Place, path: str) -> None:
        """Let the path show a real file under this name as well."""
        self.mark(path, SAME + source.physical)
