"""Floor 0. Bounded reads; atomic writes, where a reader always finds a whole file; private files, for this user alone.

What belongs to a run is private, because it may repeat anything that the script has said. A recipe is a file as any
editor writes it: its mode is what the umask gives, and one that replaces another keeps its mode.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import sys
from pathlib import Path

_PRIVATE, _USUAL = 0o600, 0o666


def write_whole(path: Path, content: str | bytes, *, private: bool = False, new: bool = False) -> None:
    """Write `content` (text as UTF-8) to `path` in one atomic step: a reader finds the old file or the whole new one.

    A `private` file has mode 0600. Another has the mode of the file that it replaces, or else what the umask gives. If
    `path` is a link, the link itself is replaced. A `new` one replaces nothing: FileExistsError. Raises OSError if the
    disk is full or the folder takes no files; `path` is then unchanged, and no other file is left beside it.
    """
    # The scratch file has a random name, because other processes and hosts may write the same file into a shared
    # folder. mkstemp is not used, because it lets only the owner read the file, whatever the umask.
    scratch = path.with_name(f".autoddp-{secrets.token_hex(8)}.tmp")
    whole = content.encode() if isinstance(content, str) else content
    try:
        try:
            _write(scratch, whole, private, path, named_at_the_end=True)
        except OSError:  # NFS and some other file systems have no files without a name
            _write(scratch, whole, private, path, named_at_the_end=False)
        if new:
            _name_new(scratch, path)
        else:
            os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise


def read_at_most(path: Path, most: int) -> bytes:
    """The first `most` bytes of a file, or of what a pipe or a device gives. OSError.

    A pipe into which nobody writes is empty: nothing waits until it is opened for writing.
    """
    # O_NONBLOCK only for the opening: what a command writes into a pipe is waited for.
    with open(path, "rb", opener=lambda file, flags: os.open(file, flags | os.O_NONBLOCK)) as file:
        os.set_blocking(file.fileno(), True)
        return file.read(most)


def write_private(path: Path, text: str) -> None:
    """Write `text` to a file that only this user can read; a file that is there is emptied first. OSError."""
    with open(path, "w", encoding="utf-8", opener=_private) as file:
        file.write(text)


def append(path: Path, text: str) -> None:
    """Add `text` to the end of a file, which is made as one that only this user can read. OSError."""
    with open(path, "a", encoding="utf-8", errors="backslashreplace", opener=_private) as file:
        file.write(text)


def _write(path: Path, whole: bytes, private: bool, like: Path, *, named_at_the_end: bool) -> None:
    """Make the file `path`; if it is not `private`, with the mode of the file `like`.

    One that is `named_at_the_end` vanishes with this process, which may be killed while a slow disk takes the content.
    """

    def opener(name: str, flags: int) -> int:
        mode = _PRIVATE if private else _USUAL
        if not named_at_the_end:
            return os.open(name, flags, mode)
        if sys.platform == "linux":
            return os.open(os.path.dirname(name) or ".", os.O_TMPFILE | os.O_WRONLY, mode)
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), name)

    with open(path, "xb", opener=opener) as file:
        if not private:
            _keep_mode(file.fileno(), like)
        file.write(whole)
        file.flush()
        os.fsync(file.fileno())  # otherwise the file may be empty after a power cut
        if named_at_the_end:
            us = file.fileno()  # with a folder, which an absolute path does not need, Python follows the link
            os.link(f"/proc/self/fd/{us}", path, src_dir_fd=us, follow_symlinks=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, _PRIVATE)


def _name_new(scratch: Path, path: Path) -> None:
    """Give the file its name, at which nothing may stand. FileExistsError.

    Only the file system knows: a host may not see for half a minute what another one has made on NFS.
    """
    try:
        os.link(scratch, path)
    except FileExistsError:
        if not os.path.samefile(scratch, path):  # NFS asks again where an answer was lost
            raise
    except OSError:  # a file system without links
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.replace(scratch, path)
        return
    scratch.unlink()


def _keep_mode(file: int, path: Path) -> None:
    """Give the file the permissions of the regular file at `path`, if there is one."""
    with contextlib.suppress(OSError):  # there is none, or the file system has no permissions
        old = os.lstat(path)
        if stat.S_ISREG(old.st_mode):
            os.fchmod(file, stat.S_IMODE(old.st_mode) & _USUAL)
