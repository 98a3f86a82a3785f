"""Removing a folder with any content, and nothing that is outside it.

What a script left in its scratch folder is removed whatever its modes are, also what it has frozen by `chattr`. A
symbolic link is removed, never followed; a folder on which something else is mounted, or that another user owns, stays
with its content. Every step goes through open folders, so that a name that changes meanwhile leads to no other place.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import sys
from collections.abc import Collection, Iterator

from autoddp.runs.owner import MARK

_DEEPEST = 40
"""Levels that are open at once. Deeper folders are moved up first, or open files and the stack would run out."""
_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602
_FROZEN = 0x10 | 0x20
"""Immutable, and append-only: what has one of these flags, or lies in such a folder, not even root can remove."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_entry(folder: int, name: str) -> bool:
    """Remove `name` from the open `folder`; whether it is gone. Never raises."""
    return _Removal(folder).entry(folder, name, 0)


def remove_contents(folder: int, spare: Collection[str] = ()) -> bool:
    """Remove all that is in the open `folder` but the names in `spare`; whether it is gone. Never raises."""
    return _Removal(folder).contents(folder, 0, spare)


def remove_folder(path: str) -> None:
    """Remove a folder of ours with all that the script has put there, as far as that is possible. Never raises.

    If it has a mark, that is the last to go: where this process is killed meanwhile, the next run finds what is left.
    """
    parent, name = os.path.split(path)
    with opened(parent) as handle:
        if handle is not None:
            removal = _Removal(handle)
            with opened(name, handle) as folder:
                if folder is not None:
                    removal.contents(folder, 0, spare=[MARK])
            removal.entry(handle, name, 0)


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], inside: int | None = None) -> Iterator[int | None]:
    """The real folder `path` (a name in the open folder `inside`, if there is one), open; None if it cannot be."""
    try:
        handle = os.open(path, _FOLDER, dir_fd=inside)
    except (OSError, ValueError):  # ValueError: a NUL in the path
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)


class _Removal:
    """One removal, which stays on the mount of the folder in which it begins."""

    def __init__(self, begin: int) -> None:
        self._mount = _mount(begin)
        self._top = -1
        """The outermost folder that is being emptied."""

    def contents(self, folder: int, depth: int, spare: Collection[str] = ()) -> bool:
        if self._mount is None or _mount(folder) != self._mount:
            return False
        if depth == 0:
            self._top = folder
        with contextlib.suppress(OSError):
            mode = stat.S_IMODE(os.fstat(folder).st_mode)
            if mode & 0o700 != 0o700:
                os.fchmod(folder, mode | 0o700)
        left, names = None, _names(folder, spare)
        while names and names != left:  # again as long as deeper folders were moved up to here
            for name in names:
                self.entry(folder, name, depth + 1)
            left, names = names, _names(folder, spare)
        return names == set()

    def entry(self, folder: int, name: str, depth: int) -> bool:
        """Remove `name` in `folder`, with all that is in it. Returns whether it is gone.

        `depth` counts the folders around its content: 0 for the outermost one that is being emptied.
        """
        return self._entry(folder, name, depth) or (self._thaw(folder, name) and self._entry(folder, name, depth))

    def _entry(self, folder: int, name: str, depth: int) -> bool:
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode):
                os.unlink(name, dir_fd=folder)
                return True
            self._unlock(folder, name, found)
            if depth > _DEEPEST:
                os.rename(name, f"deeper-{secrets.token_hex(8)}", src_dir_fd=folder, dst_dir_fd=self._top)
                return True
            with opened(name, folder) as inner:
                if inner is None or not self.contents(inner, depth):
                    return False
            os.rmdir(name, dir_fd=folder)
        except OSError as error:
            return isinstance(error, FileNotFoundError)
        return True

    def _thaw(self, folder: int, name: str) -> bool:
        """Take the flags from `name` and from `folder` by which nobody may remove it; whether there were any."""
        found = _mount(folder) == self._mount and _thawed(folder)
        with contextlib.suppress(OSError):
            mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # to open a device may do something
                return found
            handle = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                found = (_mount(handle) == self._mount and _thawed(handle)) or found
            finally:
                os.close(handle)
        return found

    def _unlock(self, folder: int, name: str, found: os.stat_result) -> None:
        """Let the owner open a folder that nobody may read, such as the work folder of an overlay."""
        if found.st_mode & 0o700 == 0o700 or found.st_uid != os.geteuid():
            return
        with contextlib.suppress(OSError, NotImplementedError):
            if not hasattr(os, "O_PATH"):
                os.chmod(name, 0o700, dir_fd=folder, follow_symlinks=False)
                return
            handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                # not `name` again: it may be a link by now, which chmod would follow
                if self._mount is not None and _mount(handle) == self._mount:
                    os.chmod(f"/proc/self/fd/{handle}", 0o700)
            finally:
                os.close(handle)


def _thawed(handle: int) -> bool:
    """Whether a file or folder of this user's was frozen, and is no more. One with a second name may be elsewhere."""
    try:
        status = os.fstat(handle)
        is_file = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
        if status.st_uid != os.geteuid() or not (is_file or stat.S_ISDIR(status.st_mode)):
            return False
        flags = int.from_bytes(fcntl.ioctl(handle, _GET_FLAGS, bytes(8)), sys.byteorder)
        if flags & _FROZEN:
            fcntl.ioctl(handle, _SET_FLAGS, (flags & ~_FROZEN).to_bytes(8, sys.byteorder))
    except OSError:  # a file system without flags, or they were set by root
        return False
    return bool(flags & _FROZEN)


def _names(folder: int, spare: Collection[str]) -> set[str] | None:
    try:
        return set(os.listdir(folder)).difference(spare)
    except OSError:
        return None


def _mount(folder: int) -> tuple[int, str] | None:
    """Which mount an open folder is on; None: unknown. A bind mount has the same device, so that is not enough."""
    try:
        device = os.fstat(folder).st_dev
    except OSError:
        return None
    try:
        with open(f"/proc/self/fdinfo/{folder}", encoding="ascii") as lines:
            return device, next((line for line in lines if line.startswith("mnt_id:")), "")
    except OSError:
        return device, ""
