"""The operating system's functions as they were before the guard took their names.

The guard uses these, never `os.open` or `open`: once it has started, those call the guard. So does what looks at paths
that the kernel is about to open, such as `elsewhere.settings`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posix
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

_MOST_LINKS = 40  # in one path, as for Linux
LINUX = sys.platform.startswith("linux")

functions: dict[str, Any] = {name: value for name, value in vars(posix).items() if callable(value)}
"""All functions of the module `posix` by name; which there are depends on the platform."""

access, chdir, chmod, chown, close, fstat = os.access, os.chdir, os.chmod, os.chown, os.close, os.fstat
getcwd, link, listdir, lstat, mkdir, open = os.getcwd, os.link, os.listdir, os.lstat, os.mkdir, os.open
read, readlink, rename, rmdir, scandir, stat = os.read, os.readlink, os.rename, os.rmdir, os.scandir, os.stat
statvfs, symlink, unlink, utime, write = os.statvfs, os.symlink, os.unlink, os.utime, os.write

Status = os.stat_result


def fail(number: int) -> NoReturn:
    """Raise the error of the kernel, without a path: `PathFunction` adds the path that the script gave."""
    raise OSError(number, os.strerror(number))


def status_or_none(path: str) -> Status | None:
    """`lstat`; None if there is nothing."""
    try:
        return lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def link_target(path: str) -> str | None:
    """`readlink`; None if there is nothing, or no symbolic link."""
    try:
        return readlink(path)
    except OSError:
        return None


def resolved(path: str, ends_at: Callable[[str], bool] = lambda _: False) -> str:
    """The path that the kernel will open: absolute and without symbolic links. What is last need not exist.

    A link for which `ends_at` is true is not followed, nor are those after it. OSError if there are too many links.
    `os.path.realpath` would ask the guard.
    """
    parts, place, links = os.path.join(getcwd(), path).split("/")[::-1], "", 0
    while parts:
        part = parts.pop()
        if part == "..":
            place = place.rpartition("/")[0]
        elif part not in ("", "."):
            if ends_at(f"{place}/{part}"):
                return "/".join([place, part, *parts[::-1]])
            target = link_target(f"{place}/{part}")
            if target is None:
                place += f"/{part}"
                continue
            links += 1
            if links > _MOST_LINKS:
                fail(errno.ELOOP)
            place = "" if target.startswith("/") else place
            parts += target.split("/")[::-1]
    return place or "/"


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
    """Do what some file systems or users cannot, such as setting an owner, and ignore the refusal."""
    with contextlib.suppress(OSError):
        action()


@contextlib.contextmanager
def opened(path: str, flags: int) -> Iterator[int]:
    """The descriptor of a file for the time of a `with` block. A file that is made has the mode 0600."""
    descriptor = open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        close(descriptor)


def create(path: str, mode: int = 0o600) -> None:
    """Make an empty file where nothing is."""
    close(open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))


def copy_attributes(source: str, target: str) -> None:
    """Copy extended attributes, where the platform has them and both file systems can hold them."""
    if "listxattr" not in functions:
        return
    getter, setter = functions["getxattr"], functions["setxattr"]
    with contextlib.suppress(OSError):
        for name in functions["listxattr"](source, follow_symlinks=False):
            best_effort(lambda name=name: setter(target, name, getter(source, name, follow_symlinks=False)))  # type: ignore[misc]


def copy_data(source: str, target: str) -> None:
    """Make the file `target` with the bytes of `source`; the kernel copies where it can."""
    new = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with opened(source, os.O_RDONLY) as from_file, opened(target, new) as to_file:
        _copy(from_file, to_file)


def _copy(from_file: int, to_file: int) -> None:
    quick = functions.get("copy_file_range")
    while quick is not None:
        try:
            if not quick(from_file, to_file, 1 << 30):
                break  # the end, or a file system that has no such copy: the loop below copies what is missing
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EIO):
                raise
            break
    while block := read(from_file, 1 << 20):
        while block:
            block = block[write(to_file, block) :]


def remove_tree(path: str) -> None:
    """Remove something in the guard's own folder, with all that is in it."""
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
