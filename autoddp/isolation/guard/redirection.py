"""What a path means to the script: the real file system with the script's own changes on top.

    upper     a folder of the scratch. Below it, everything that the script has written lies under its full path.
    lower     the real file system, which is only read.
    through   folders in which nothing is redirected: plan.writable, /proc, /sys, and /dev but for /dev/shm.

Three things in `upper` are the overlay's own. A symbolic link to `GONE` says that the script has deleted the real file
of that name. A symbolic link to `SAME` and a path says that the real file there now has this name: a rename copies
nothing. A link named `BENEATH` in a folder says which real folder shows through it, or with `GONE` that none does.
All of it lies on disk, so every process sees a change at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterable
from dataclasses import replace

from autoddp.isolation.guard import real
from autoddp.isolation.guard.places import Folder, Place
from autoddp.isolation.guard.turns import Turns

GONE = "/.autoddp-overlay/gone"
SAME = "/.autoddp-overlay/same"
BENEATH = ".autoddp-beneath"
_MOST_LINKS = 40  # as the kernel's
_REMEMBERED_FOR = 1.0  # seconds: another program may replace a real folder


def is_ours(target: str | None) -> bool:
    """Whether the target of a symbolic link in `upper` is one of the overlay's own marks."""
    return target is not None and (target == GONE or target.startswith(SAME))


def _parts(path: str) -> list[str]:
    """Reversed, so that the next one is popped."""
    return path.split("/")[::-1]


class Overlay:
    """Finds places. `changes.Changes` alters them.

    overlay.resolve("model.pt").physical
    """

    def __init__(self, scratch: str, writable: Iterable[str], turns: Turns) -> None:
        self.scratch = scratch
        self.upper = f"{scratch}/upper"
        self.turns = turns
        self.roots = frozenset((*writable, scratch, "/proc", "/sys"))
        self._folders: dict[tuple[str, bool], tuple[int, float, Folder]] = {}

    def cwd(self) -> str:
        """The working directory in the script's view; it may be one that the script has deleted."""
        return self.virtual(real.getcwd())

    def virtual(self, path: str) -> str:
        """The script's name for a path that the kernel or a native library gave, which may lie in `upper`."""
        if path == self.upper:
            return "/"
        return path[len(self.upper) :] if path.startswith(self.upper + "/") else path

    def folder_of(self, descriptor: int) -> str:
        """The path of an open folder in the script's view."""
        path = real.path_of(descriptor)
        if not stat.S_ISDIR(real.fstat(descriptor).st_mode):
            real.fail(errno.ENOTDIR)
        if path.endswith(" (deleted)"):
            real.fail(errno.ENOENT)
        return self.virtual(path)

    def absolute(self, path: str, dir_fd: int | None = None) -> str:
        """Joined with the folder that it is relative to; `..` and symbolic links stay."""
        if not path:
            real.fail(errno.ENOENT)
        if path.startswith("/"):
            return self.virtual(path)
        base = self.cwd() if dir_fd is None or dir_fd < 0 else self.folder_of(dir_fd)
        return f"{base}/{path}"

    def resolve(self, path: str, follow: bool = True, dir_fd: int | None = None, real_only: bool = False) -> Place:
        """The place of a path. Raises as the kernel does when a folder on the way is missing or none.

        `real_only` is the kernel's view: without anything that the script has changed.
        """
        path = self.absolute(path, dir_fd)
        if real_only:  # nobody's change matters
            return self._resolve(path, follow, real_only)
        return self.turns.steady(lambda: self._resolve(path, follow, real_only))

    def as_it_is(self, path: object, follow: bool) -> real.Status | None:
        """The status of what a folder holds in which nothing is redirected; None: only `resolve` can tell.

        Importing torch looks at 17,000 paths, nearly all of them of this kind. ENOENT is raised as by the kernel.
        """
        if type(path) is not str or not path.startswith("/") or path in self.roots:
            return None
        head, _, tail = path.rpartition("/")
        number = self.turns.number()
        known = self._folders.get((head, False))
        if known is None or known[0] != number or time.monotonic() - known[1] > _REMEMBERED_FOR:
            return None
        folder = known[2]
        is_plain = folder.path == folder.lower == head and not folder.upper and not folder.through
        if not is_plain or tail in ("", ".", "..") or head == "/dev" or "\0" in tail:
            return None
        status = real.status_or_none(path)
        if self.turns.number() != number or (status is not None and follow and stat.S_ISLNK(status.st_mode)):
            return None
        if status is None:
            real.fail(errno.ENOENT)
        return status

    def _resolve(self, path: str, follow: bool, real_only: bool) -> Place:
        head, _, tail = path.rpartition("/")
        if tail in ("", ".", ".."):
            return self._walk(self._root(real_only), _parts(path), follow)
        key, number, now = (head, real_only), self.turns.number(), time.monotonic()
        known = self._folders.get(key)
        if known is None or known[0] != number or now - known[1] > _REMEMBERED_FOR:
            place = self._walk(self._root(real_only), _parts(head + "/"), True)
            place.found()
            if len(self._folders) > 4096:
                self._folders.clear()
            known = self._folders[key] = (number, now, self.folder(place))
        place = self.child(known[2], tail)
        if place.is_link and follow:
            return self._walk(known[2], [tail], True)
        return place

    def _root(self, real_only: bool) -> Folder:
        place = Place(None, "", "/", "/", real.lstat("/"))
        return Folder(place, "/", upper=not real_only, lower="/", through=False)

    def _walk(self, start: Folder, pending: list[str], follow: bool) -> Place:
        folders = _ancestors(start)
        links = start.place.links
        dot = slash = ""
        while pending:
            name = pending.pop()
            dot = slash = ""
            if name in ("", "."):
                dot, slash = name, "/"
                continue
            if name == "..":
                dot, slash = name, "/"
                if len(folders) > 1:
                    folders.pop()
                continue
            place = self.child(folders[-1], name)
            place.slash = any(part == "." for part in pending) or bool(pending)
            place.links = links
            place.dot = "." if "." in pending else ""
            last = all(part in ("", ".") for part in pending)
            if place.is_link and (follow or place.slash) and (target := self._target(place)) is not None:
                links += 1
                if links > _MOST_LINKS:
                    real.fail(errno.ELOOP)
                if target.startswith("/"):
                    folders = folders[:1]
                pending.extend(_parts(target))
                continue
            if place.is_link and place.through and follow:  # a descriptor of /proc without a path: pipes and such
                with contextlib.suppress(OSError):
                    place.status = real.stat(place.physical)
            if last:
                if place.dot:
                    place.found()
                if place.slash and place.exists and not place.is_folder:
                    real.fail(errno.ENOTDIR)
                return place
            place.found()
            if not place.is_folder:
                real.fail(errno.ENOTDIR)
            folders.append(self.folder(place))
        return replace(folders[-1].place, slash=bool(slash), dot=dot, links=links)

    def _target(self, place: Place) -> str | None:
        """Where a symbolic link leads. None: only the kernel can follow it."""
        target = real.readlink(place.physical)
        if place.through and place.path.startswith("/proc/"):
            if target.startswith("/") and real.status_or_none(target) is None and real.allowed(place.physical, os.F_OK):
                return None  # deleted, or a memory file
            if ":[" in target:
                return None
        return self.virtual(target)

    def child(self, folder: Folder, name: str) -> Place:
        """The place of one entry of a folder."""
        path = folder.child_path(name)
        # Files in shared memory are the user's too; shared memory itself is not opened by path.
        device = folder.path == "/dev" and name != "shm"
        if folder.through or device or path in self.roots:
            return Place(folder, name, path, path, real.status_or_none(path), through=True)
        if folder.upper and name != BENEATH:
            physical = self.upper + path
            status = real.status_or_none(physical)
            if status is not None:
                target = real.link_target(physical) if stat.S_ISLNK(status.st_mode) else None
                if target is None or not is_ours(target):
                    return Place(folder, name, path, physical, status, upper=True)
                if target == GONE:
                    return Place(folder, name, path, physical, None)
                target = target[len(SAME) :]
                return Place(folder, name, path, target, real.status_or_none(target))
        beneath = folder.beneath(name)
        status = None if beneath is None else real.status_or_none(beneath)
        if beneath is None or status is None:
            return Place(folder, name, path, self.upper + path, None)
        return Place(folder, name, path, beneath, status)

    def folder(self, place: Place) -> Folder:
        """The folder at a place that is one."""
        if place.folder is None:
            return Folder(place, "/", upper=True, lower="/", through=False)
        if not place.is_folder:
            real.fail(errno.ENOTDIR)
        if place.through:
            return Folder(place, place.path, upper=False, lower=place.path, through=True)
        if not place.upper:
            return Folder(place, place.path, upper=False, lower=place.physical, through=False)
        lower: str | None = real.link_target(f"{place.physical}/{BENEATH}")
        if lower is None:
            lower = place.folder.beneath(place.name)
        elif lower == GONE:
            lower = None
        status = None if lower is None else real.status_or_none(lower)
        if status is None or not stat.S_ISDIR(status.st_mode):
            lower = None
        return Folder(place, place.path, upper=True, lower=lower, through=False)

    def names(self, folder: Folder) -> dict[str, os.DirEntry[str] | None]:
        """The entries of a folder, with the real file system's answer for each that is a file of its own."""
        found: dict[str, os.DirEntry[str] | None] = {}
        gone = set()
        if folder.upper and not folder.through:
            with real.scandir(self.upper + folder.path) as entries:
                for entry in entries:
                    target = real.link_target(entry.path) if entry.is_symlink() else None
                    if target == GONE or entry.name == BENEATH:
                        gone.add(entry.name)
                    else:
                        found[entry.name] = None if is_ours(target) else entry
        if folder.lower is not None:
            with real.scandir(folder.lower) as entries:
                for entry in entries:
                    if entry.name not in gone and entry.name not in found:
                        found[entry.name] = entry
        if folder.path == os.path.dirname(self.scratch):
            # A script that walks its folder must not find what it has written a second time, or the root again.
            found.pop(os.path.basename(self.scratch), None)
        return found


def _ancestors(folder: Folder) -> list[Folder]:
    """From the root down to the folder itself."""
    chain = [folder]
    while (parent := chain[-1].place.folder) is not None:
        chain.append(parent)
    return chain[::-1]
