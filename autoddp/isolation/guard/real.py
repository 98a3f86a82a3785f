"""The operating system's functions as they were before the guard took their names.

All other files here use these and never `os.open` or `open`: those lead back into the guard once it has started.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posix
import sys
from collections.abc import Callable
from typing import Any, NoReturn

LINUX = sys.platform.startswith("linux")

functions: dict[str, Any] = {name: value for name, value in vars(posix).items() if callable(value)}
"""Everything of the module `posix`, by name; which names there are depends on the platform."""

access, chdir, chmod, chown, close, fstat = os.access, os.chdir, os.chmod, os.chown, os.close, os.fstat
getcwd, link, listdir, lstat, mkdir, open = os.getcwd, os.link, os.listdir, os.lstat, os.mkdir, os.open
read, readlink, rename, rmdir, scandir, stat = os.read, os.readlink, os.rename, os.rmdir, os.scandir, os.stat
statvfs, symlink, unlink, utime, write = os.statvfs, os.symlink, os.unlink, os.utime, os.write

Status = os.stat_result
realpath = os.path.realpath  # correct only before the guard has started: it calls os.lstat by name


def fail(number: int) -> NoReturn:
    """Raise what the kernel would have raised. Whoever knows the path as the script wrote it adds it."""
    raise OSError(number, os.strerror(number))


def status_or_none(path: str) -> Status | None:
    """`lstat`, with None for what is not there."""
    try:
        return lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def link_target(path: str) -> str | None:
    """`readlink`, with None for what is not there or no symbolic link."""
    try:
        return readlink(path)
    except OSError:
        return None


def path_of(descriptor: int) -> str:
    """The path of an open file or folder; raises OSError as the kernel does for a bad descriptor."""
    fstat(descriptor)
    if LINUX:
        return readlink(f"/proc/self/fd/{descriptor}")
    import fcntl

    return os.fsdecode(fcntl.fcntl(descriptor, 50, bytes(1024)).rstrip(b"\0"))  # F_GETPATH of macOS


def allowed(path: str, mode: int) -> bool:
    """`access` for the effective user where the platform can tell."""
    if access in os.supports_effective_ids:
        return access(path, mode, effective_ids=True)
    return access(path, mode)


def best_effort(action: Callable[[], object]) -> None:
    """Do what not every file system or user can: owners, extended attributes."""
    with contextlib.suppress(OSError):
        action()


def copy_attributes(source: str, target: str) -> None:
    """Extended attributes, where there are any and both sides can hold them."""
    names, getter, setter = (functions.get(name) for name in ("listxattr", "getxattr", "setxattr"))
    if names is None or getter is None or setter is None:
        return
    with contextlib.suppress(OSError):
        for name in names(source, follow_symlinks=False):
            best_effort(lambda name=name: setter(target, name, getter(source, name, follow_symlinks=False)))  # type: ignore[misc]


def copy_data(source: str, target: str) -> None:
    """A new file `target` with the bytes of `source`, in the kernel where possible."""
    from_file = open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        to_file = open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _copy(from_file, to_file)
        finally:
            close(to_file)
    finally:
        close(from_file)


def _copy(from_file: int, to_file: int) -> None:
    quick = functions.get("copy_file_range")
    while quick is not None:
        try:
            if not quick(from_file, to_file, 1 << 30):
                break  # at the end, or a file system that has no such copy: the loop below finds out
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EIO):
                raise
            break
    while block := read(from_file, 1 << 20):
        while block:
            block = block[write(to_file, block) :]


def remove_tree(path: str) -> None:
    """Remove what the guard itself has put aside in its own folder."""
    status = status_or_none(path)
    if status is None:
        return
    if status.st_mode & 0o170000 != 0o040000:
        best_effort(lambda: unlink(path))
        return
    best_effort(lambda: chmod(path, 0o700))
    with contextlib.suppress(OSError):
        for name in listdir(path):
            remove_tree(f"{path}/{name}")
    best_effort(lambda: rmdir(path))
