"""What a path means to the script: the real file system with the script's own changes on top.

    upper     a folder in the scratch folder. What the script has written lies in it under its full path.
    lower     the real file system, which is only read.
    direct    folders in which nothing is redirected: plan.writable, /proc, /sys, and /dev but for /dev/shm.

The guard keeps three marks of its own in `upper`. A symbolic link to `GONE` says that the script has deleted the real
file of that name. A symbolic link to `SAME` and a path says that the real file of that path now has this name, so a
rename copies nothing. A link named `BENEATH` in a folder names the real folder whose entries show in it; if it leads to
`GONE`, there is none. All of this is on disk, so every process sees a change at once.
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
from dataclasses import dataclass, replace
from typing import NoReturn

from autoddp.isolation import real
from autoddp.isolation.guard.lock import ChangeLock
from autoddp.isolation.guard.paths import Descriptor, Path, text

GONE = "/.autoddp-overlay/gone"
SAME = "/.autoddp-overlay/same"
BENEATH = ".autoddp-beneath"
_MOST_LINKS = 40  # symbolic links on the way of one path, as in the kernel
_REMEMBERED_FOR = 1.0  # seconds: another program may replace a real folder
_LARGEST_COPY = 0.2  # of the free space in the scratch folder, for one file: the user's disk must not fill up


def is_mark(target: str | None) -> bool:
    """Whether a symbolic link in `upper` with this target is one of the guard's marks."""
    return target is not None and (target == GONE or target.startswith(SAME))


def _reversed_parts(path: str) -> list[str]:
    """The parts of a path, the first one last, to be popped."""
    return path.split("/")[::-1]


@dataclass(eq=False)
class Folder:
    """A folder as the script sees it."""

    place: Place
    """Parent of the folder, and its name there."""
    path: str
    """The folder's path as the script sees it, free of symbolic links."""
    upper: bool
    """Whether `upper` has a folder of this path."""
    lower: str | None
    """The real folder whose entries show in it; None if there is none."""
    direct: bool = False
    """Nothing is redirected in it."""

    def child_path(self, name: str) -> str:
        """The path of an entry."""
        return f"/{name}" if self.path == "/" else f"{self.path}/{name}"

    def beneath(self, name: str) -> str | None:
        """The path of the real file that shows under this name where `upper` has none."""
        return None if self.lower is None else f"{self.lower.rstrip('/')}/{name}"


@dataclass(eq=False)
class Place:
    """A name in a folder as the script sees it, whether or not something is there."""

    folder: Folder | None
    """None for the root folder only."""
    name: str
    path: str
    """The place's path as the script sees it; only its last part may be a symbolic link."""
    physical: str
    """The path on disk of what is there, or at which it would be made."""
    status: real.Status | None
    """The `lstat` of what is there; None if nothing is."""
    upper: bool = False
    """It lies in `upper`."""
    direct: bool = False
    """It lies in a folder in which nothing is redirected."""
    slash: bool = False
    """The given path ended in a slash or a dot, so this must be a folder."""
    dot: str = ""
    """The last part of the given path, if that was `.` or `..`."""
    links: int = 0
    """How many symbolic links were followed on the way."""

    @property
    def exists(self) -> bool:
        return self.status is not None

    @property
    def is_folder(self) -> bool:
        return self.status is not None and stat.S_ISDIR(self.status.st_mode)

    @property
    def is_link(self) -> bool:
        return self.status is not None and stat.S_ISLNK(self.status.st_mode)

    @property
    def is_file(self) -> bool:
        return self.status is not None and stat.S_ISREG(self.status.st_mode)

    @property
    def is_real(self) -> bool:
        """Something of the user's, which must stay as it is."""
        return self.status is not None and not self.upper and not self.direct

    def found(self) -> real.Status:
        """The status of what is there; ENOENT if nothing is."""
        if self.status is None:
            real.fail(errno.ENOENT)
        return self.status


class View:
    """Finds what a path means, and has the steps of which every change consists. None of them touches a real file.

    view.resolve("model.pt").physical

    A step that changes something expects that its caller holds the lock, and calls `begin_change` itself.
    """

    def __init__(self, scratch: str, writable: Iterable[str], stop: Callable[[str], NoReturn]) -> None:
        self.scratch = scratch
        self.upper = f"{scratch}/upper"
        self.stop = stop
        """Ends tuning, where a change is not possible in the view."""
        self.lock = ChangeLock(scratch)
        self._own = frozenset((*writable, scratch))
        self.direct = self._own | {"/proc", "/sys"}
        self._folders: dict[tuple[str, bool], tuple[int, float, Folder]] = {}
        self._numbers = itertools.count(time.monotonic_ns())  # a later process may have the number of an earlier one

    def in_scratch(self, path: str) -> bool:
        """Whether a path lies in the guard's own folder."""
        return path.startswith(self.scratch + "/")

    def cwd(self) -> str:
        """The script's working directory, which the script may have deleted."""
        return self.virtual(real.getcwd())

    def virtual(self, path: str) -> str:
        """The script's name for a path that the kernel or a native library gave, which may lie in `upper`."""
        if path == self.upper:
            return "/"
        return path[len(self.upper) :] if path.startswith(self.upper + "/") else path

    def folder_of(self, descriptor: int) -> str:
        """The path of an open folder as the script sees it."""
        path = real.path_of(descriptor)
        if not stat.S_ISDIR(real.fstat(descriptor).st_mode):
            real.fail(errno.ENOTDIR)
        if path.endswith(" (deleted)"):
            real.fail(errno.ENOENT)
        return self.virtual(path)

    def resolve(self, path: Path, follow: bool = True, dir_fd: Descriptor = None, real_only: bool = False) -> Place:
        """The place that a path names. Raises the kernel's error when a folder on the way is missing or no folder.

        With `real_only` the script's changes are left out: this is what the kernel would find.
        """
        name = text(path)
        if not name:
            real.fail(errno.ENOENT)
        if name.startswith("/"):
            full = self.virtual(name)
        else:
            full = f"{self.cwd() if dir_fd is None or dir_fd < 0 else self.folder_of(dir_fd)}/{name}"
        if real_only:  # no change can come between
            return self._resolve(full, follow, real_only)
        return self.lock.consistent(lambda: self._resolve(full, follow, real_only))

    def existing(self, path: Path, follow: bool = True, dir_fd: Descriptor = None) -> Place:
        """The place that a path names, see `resolve`; ENOENT if nothing is there."""
        place = self.resolve(path, follow, dir_fd)
        place.found()
        return place

    def status_if_plain(self, path: object, follow: bool) -> real.Status | None:
        """The real status of a path in a folder that the script has not changed; None: only `resolve` can tell.

        A short cut: importing torch looks at 17,000 paths, nearly all of them of this kind. ENOENT is raised as by the
        kernel.
        """
        if type(path) is not str or not path.startswith("/") or path in self.direct:
            return None
        head, _, tail = path.rpartition("/")
        number = self.lock.number()
        folder = self._remembered(head, False, number)
        if folder is None or folder.upper or folder.direct or not folder.path == folder.lower == head:
            return None
        if tail in ("", ".", "..") or head == "/dev" or "\0" in tail:
            return None
        status = real.status_or_none(path)
        if self.lock.number() != number or (status is not None and follow and stat.S_ISLNK(status.st_mode)):
            return None
        if status is None:
            real.fail(errno.ENOENT)
        return status

    def _remembered(self, path: str, real_only: bool, number: int) -> Folder | None:
        """A folder that was looked up less than a second ago, when there had been as many changes as now."""
        known = self._folders.get((path, real_only))
        fresh = known is not None and known[0] == number and time.monotonic() - known[1] <= _REMEMBERED_FOR
        return known[2] if known is not None and fresh else None

    def _resolve(self, path: str, follow: bool, real_only: bool) -> Place:
        try:
            return self._from_root(path, follow, real_only)
        except FileNotFoundError:
            own = next((each for each in self._own if f"{path}/".startswith(f"{each}/")), "")
            if not own:
                raise
            # The script has removed a folder above it. The run's own folder is still there, and in use.
            place = Place(self._root(real_only), own, own, own, real.lstat(own), direct=True)
            return self._walk(self.folder(place), _reversed_parts(path[len(own) :]), follow)

    def _from_root(self, path: str, follow: bool, real_only: bool) -> Place:
        head, _, tail = path.rpartition("/")
        if tail in ("", ".", ".."):
            return self._walk(self._root(real_only), _reversed_parts(path), follow)
        number, now = self.lock.number(), time.monotonic()
        folder = self._remembered(head, real_only, number)
        if folder is None:
            place = self._walk(self._root(real_only), _reversed_parts(head + "/"), True)
            place.found()
            if len(self._folders) > 4096:
                self._folders.clear()
            folder = self.folder(place)
            self._folders[head, real_only] = (number, now, folder)
        place = self.child(folder, tail)
        if place.is_link and follow:
            return self._walk(folder, [tail], True)
        return place

    def _root(self, real_only: bool) -> Folder:
        return Folder(Place(None, "", "/", "/", real.lstat("/")), "/", upper=not real_only, lower="/")

    def _walk(self, start: Folder, pending: list[str], follow: bool) -> Place:
        folders = _with_ancestors(start)
        links = start.place.links
        dot = slash = ""
        while pending:
            name = pending.pop()
            dot = slash = ""
            if name in ("", ".", ".."):
                dot, slash = name, "/"
                if name == ".." and len(folders) > 1:
                    folders.pop()
                continue
            place = self.child(folders[-1], name)
            place.slash = bool(pending)
            place.links = links
            place.dot = "." if "." in pending else ""
            if place.is_link and (follow or place.slash) and (target := self._target(place)) is not None:
                links += 1
                if links > _MOST_LINKS:
                    real.fail(errno.ELOOP)
                if target.startswith("/"):
                    folders = folders[:1]
                pending.extend(_reversed_parts(target))
                continue
            if place.is_link and place.direct and follow:  # a link of /proc to a descriptor without a path: a pipe
                with contextlib.suppress(OSError):
                    place.status = real.stat(place.physical)
            if all(part in ("", ".") for part in pending):
                if place.dot:
                    place.found()
                if place.slash and place.exists and not place.is_folder:
                    real.fail(errno.ENOTDIR)
                return place
            place.found()
            folders.append(self.folder(place))
        return replace(folders[-1].place, slash=bool(slash), dot=dot, links=links)

    def _target(self, place: Place) -> str | None:
        """The path to which a symbolic link leads; None if only the kernel can follow it."""
        target = real.readlink(place.physical)
        if place.direct and place.path.startswith("/proc/"):
            if target.startswith("/") and real.status_or_none(target) is None and real.allowed(place.physical, os.F_OK):
                return None  # a deleted file, or a file in memory
            if ":[" in target:
                return None
        return self.virtual(target)

    def child(self, folder: Folder, name: str) -> Place:
        """The place of one entry of a folder."""
        path = folder.child_path(name)
        # Files in shared memory are the user's, so they are redirected, unlike the other entries of /dev.
        device = folder.path == "/dev" and name != "shm"
        if folder.direct or device or path in self.direct:
            return Place(folder, name, path, path, real.status_or_none(path), direct=True)
        if folder.upper and name != BENEATH:
            physical = self.upper + path
            status = real.status_or_none(physical)
            if status is not None:
                target = real.link_target(physical) if stat.S_ISLNK(status.st_mode) else None
                if target is None or not is_mark(target):
                    return Place(folder, name, path, physical, status, upper=True)
                if target == GONE:
                    return Place(folder, name, path, physical, None)
                target = target[len(SAME) :]
                return Place(folder, name, path, target, real.status_or_none(target))
        beneath = folder.beneath(name)
        status = None if beneath is None else real.status_or_none(beneath)
        return Place(folder, name, path, beneath if beneath and status else self.upper + path, status)

    def folder(self, place: Place) -> Folder:
        """The folder at a place; ENOTDIR if something else is there."""
        if place.folder is None:
            return Folder(place, "/", upper=True, lower="/")
        if not place.is_folder:
            real.fail(errno.ENOTDIR)
        if not place.upper:
            return Folder(place, place.path, upper=False, lower=place.physical, direct=place.direct)
        mark = real.link_target(f"{place.physical}/{BENEATH}")
        lower = place.folder.beneath(place.name) if mark is None else mark
        status = None if lower is None or lower == GONE else real.status_or_none(lower)
        if status is None or not stat.S_ISDIR(status.st_mode):
            lower = None
        return Folder(place, place.path, upper=True, lower=lower)

    def names(self, folder: Folder) -> dict[str, os.DirEntry[str] | None]:
        """The entries of a folder by name, each with its entry on disk, or None where that is one of the marks."""
        found: dict[str, os.DirEntry[str] | None] = {}
        gone = set()
        if folder.upper and not folder.direct:
            with real.scandir(self.upper + folder.path) as entries:
                for entry in entries:
                    target = real.link_target(entry.path) if entry.is_symlink() else None
                    if target == GONE or entry.name == BENEATH:
                        gone.add(entry.name)
                    else:
                        found[entry.name] = None if is_mark(target) else entry
        if folder.lower is not None:
            with real.scandir(folder.lower) as entries:
                for entry in entries:
                    if entry.name not in gone and entry.name not in found:
                        found[entry.name] = entry
        for own in self._own:
            # A script that walks its folder must not find what it has written a second time. One that empties it must
            # not remove the run's logs, nor fail because the kernel refuses it.
            if folder.path == os.path.dirname(own):
                found.pop(os.path.basename(own), None)
        return found

    def aside(self) -> str:
        """A new path on the same file system, for what is to become visible by a rename."""
        return f"{self.scratch}/aside/{os.getpid()}-{threading.get_ident()}-{next(self._numbers)}"

    def above(self, place: Place) -> str:
        """The path on disk of a changed place."""
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
        """The folder of a place, if the script may remove that entry: in one like /tmp only an entry of its own."""
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
        """The path by which the kernel finds a folder: the real one's if it is the same, else the one in `upper`."""
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


def _with_ancestors(folder: Folder) -> list[Folder]:
    """The folder and all above it, from the root down."""
    chain = [folder]
    while (parent := chain[-1].place.folder) is not None:
        chain.append(parent)
    return chain[::-1]


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
