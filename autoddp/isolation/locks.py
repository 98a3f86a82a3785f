"""Locks of other programs on the user's files count for the script while it is tuned, as they do under torchrun.

Under overlay and guard a file that is opened to be locked is not the user's own, so the kernel would give the lock to a
script that is to wait for another job, or to end beside it. Its list of locks has those of all programs.

Not promised: locks that other hosts hold on a network file system, and those that native code or `flock` asks for.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator

from autoddp.isolation import real
from autoddp.isolation.hooks import check_events
from autoddp.isolation.kernel.mounts import mount_at

IsTheUsers = Callable[[str, int], bool]
"""Whether a device, such as `fe:00`, and an inode there are those of the user's file."""
_LOOKS = 0.05  # seconds
_OF_THE_FILE = (1 << 56) - 1  # bits of an inode's number: an overlay of several disks puts more above them


def watch_locks(users: Callable[[int], IsTheUsers | None]) -> None:
    """From now on locks of others count. `users` tells the user's file for an open one; None where it is the same."""
    if not os.path.exists("/proc/locks"):
        return
    check_events(
        {
            "fcntl.flock": lambda file, operation: _wait(("FLOCK",), users, file, operation),
            "fcntl.lockf": lambda file, operation, *part: _wait(("POSIX", "OFDLCK"), users, file, operation, *part),
        }
    )


def beneath_the_overlay(file: int) -> IsTheUsers | None:
    """The user's file beneath an open one of the attempt's overlays. Locks of others on any other file count already.

    An overlay shows the number that a file has beneath it, also where the file was copied.
    """
    mount = mount_at(f"/proc/self/fd/{file}")
    if mount is None or not mount.covers:
        return None
    major, _, minor = mount.covers.partition(":")
    return _file(int(major), int(minor), os.fstat(file).st_ino & _OF_THE_FILE)


def file_of(status: real.Status) -> IsTheUsers:
    """The file with this status."""
    return _file(os.major(status.st_dev), os.minor(status.st_dev), status.st_ino)


def _file(major: int, minor: int, inode: int) -> IsTheUsers:
    return lambda device, number: (device, number) == (f"{major:02x}:{minor:02x}", inode)


def _wait(
    kinds: tuple[str, ...],
    users: Callable[[int], IsTheUsers | None],
    file: int,
    operation: int,
    length: int | None = None,
    start: int | None = None,
    whence: int = 0,
) -> None:
    """Wait as the kernel would, or raise its error, as long as another program holds a lock in the way."""
    if operation & fcntl.LOCK_UN or whence:
        return
    try:
        is_the_users = users(file)
    except OSError:  # the call itself will fail
        return
    begin = start or 0
    last = begin + length - 1 if length else float("inf")
    shared = not operation & fcntl.LOCK_EX
    while is_the_users is not None and any(
        is_the_users(device, inode) and not (shared and is_shared) and first <= last and begin <= end
        for device, inode, is_shared, first, end in _held(kinds)
    ):
        if operation & fcntl.LOCK_NB:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        time.sleep(_LOOKS)


def _held(kinds: tuple[str, ...]) -> Iterator[tuple[str, int, bool, int, float]]:
    """Device, inode, whether it is shared, first and last byte of each lock of these kinds that others may hold."""
    with open("/proc/locks", encoding="ascii") as lines:
        for words in map(str.split, lines):
            # A lock that is waited for has an arrow before its kind. A process has no POSIX lock against itself.
            if len(words) == 8 and words[1] in kinds and (words[1], words[4]) != ("POSIX", str(os.getpid())):
                device, _, inode = words[5].rpartition(":")
                yield device, int(inode), words[3] == "READ", int(words[6]), float(words[7].replace("EOF", "inf"))
