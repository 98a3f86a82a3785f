"""Who made a folder, and whether that launcher is still running.

A run's folder, and each private folder that it makes elsewhere, contain a file `owner.json`: the *mark*. It names the
launcher by host, boot, process id and start time, and the folder itself by path and inode, so that a copy or a renamed
folder is not taken for the original. The launcher keeps a lock on the file while it runs, because process ids mean
nothing in another container, and hosts may share a name.

    folder = read_mark("/tmp/autoddp-1f2e3d4c")      # None unless it has a sound mark, made by this user
    if folder is not None and folder.may_be_cleaned():
        ...
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil

from autoddp.codec import Meta, Struct, decode, encode, replace

MARK = "owner.json"
_LARGEST = 2**16  # bytes of a mark; ours have less than 4 KiB
_LOCK_TRIES = 20  # another launcher that reads the mark has the lock for less than a millisecond
_BETWEEN_TRIES = 0.01  # seconds

# A mark is read from a file that anybody may have changed, so its values are checked, not only their types.
_Text = Annotated[str, Meta(pattern=r"\A[^\0]*\Z")]
_Number = Annotated[int, Meta(gt=0)]
_Date = Annotated[float, Meta(gt=-1e12, lt=1e12)]  # neither infinite nor NaN


class Owner(Struct, frozen=True, forbid_unknown_fields=True):
    """A launcher, told apart from every other one."""

    host: _Text
    boot_id: _Text
    """Changes when the machine is started; "" where the system has none."""
    pid: _Number
    started: _Text
    """When the process started, in the system's own format; "" if that is unknown."""
    pid_namespace: _Text
    """The namespace in which `pid` is valid: each container counts its processes from 1."""

    @classmethod
    def of_this_process(cls) -> Owner:
        """This process."""
        pid = os.getpid()
        return cls(socket.gethostname(), _boot_id(), pid, _started(pid), _pid_namespace())

    def is_here(self) -> bool:
        """Whether it ran on this host: also in another container here, which has a host name of its own."""
        return self.host == socket.gethostname() or bool(self.boot_id and self.boot_id == _boot_id())


class Mark(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `owner.json`. No field may be absent."""

    kind: Literal["folder of an autoddp run"]
    owner: Owner
    run: _Text
    """Name of the run folder."""
    path: _Text
    """The marked folder, without symbolic links in its path."""
    inode: _Number
    made: _Date
    """Seconds since 1970."""
    locked: bool
    """Whether the owner has a lock on the file; some network file systems have no locks."""
    folders: tuple[_Text, ...]
    """Private folders elsewhere that belong to the marked folder, if that is a run folder."""
    ended: bool
    """The launcher ended in order, and wrote so at its end."""

    def text(self) -> str:
        """The file's content."""
        return encode(self, indent=1) + "\n"

    @classmethod
    def parse(cls, text: bytes) -> Mark | None:
        """The mark that this text is; None for any other text, for example the mark of another version."""
        with contextlib.suppress(ValueError):
            return decode(text, cls)
        return None


@dataclass
class Marked:
    """An open folder with a mark that names this folder and no other; call `close` at the end."""

    path: Path
    mark: Mark
    folder: int
    _parent: int
    _file: int

    def close(self) -> None:
        """Close the files, which also releases the lock that `may_be_cleaned` took."""
        for handle in (self._file, self.folder, self._parent):
            os.close(handle)

    def may_be_cleaned(self) -> bool:
        """Whether its owner ran on this host and is gone. This process then has the lock, and no other cleans it."""
        return self.mark.owner.is_here() and (self.has_ended() or self._is_dead())

    def has_ended(self) -> bool:
        """Whether its owner, on any host, ended in order, so that nobody uses the folder."""
        return self.mark.ended and _try_to_lock(self._file) is not False

    def remove_itself(self) -> bool:
        """Remove the mark and the folder, which must be empty otherwise: the mark is the last file to go."""
        try:
            here = os.stat(self.path.name, dir_fd=self._parent, follow_symlinks=False)
            if not os.path.samestat(here, os.fstat(self.folder)) or os.listdir(self.folder) != [MARK]:
                return False
            os.unlink(MARK, dir_fd=self.folder)
            os.dup2(self.folder, self._file, inheritable=False)  # closed: NFS keeps an open file by another name
            os.rmdir(self.path.name, dir_fd=self._parent)
        except OSError:
            return False
        return True

    def _is_dead(self) -> bool:
        free = _try_to_lock(self._file)
        owner = self.mark.owner
        if free is False or (free is None and self.mark.locked):
            return False
        if owner.boot_id and _boot_id() and owner.boot_id != _boot_id():
            return True
        if owner.pid_namespace != _pid_namespace():
            return self.mark.locked  # its process id is not valid here, but its lock is
        return not _is_running(owner.pid, owner.started)


def read_mark(path: str | os.PathLike[str]) -> Marked | None:
    """The marked folder `path`. None where anything is not as this module writes it, or belongs to another user."""
    place = Path(path)
    with contextlib.ExitStack() as stack:

        def opened(name: str, flags: int, inside: int | None = None) -> int:
            handle = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)
            stack.callback(os.close, handle)
            return handle

        try:
            if os.path.realpath(place) != str(place):
                return None
            parent = opened(str(place.parent), os.O_RDONLY | os.O_DIRECTORY)
            folder = opened(place.name, os.O_RDONLY | os.O_DIRECTORY, parent)
            # for writing: some network file systems lock only what may be written. A pipe would not block.
            file = opened(MARK, os.O_RDWR | os.O_NONBLOCK, folder)
            mark = _content(file)
            itself = os.fstat(folder)
        except (OSError, ValueError):
            return None
        if mark is None or itself.st_uid != os.geteuid():
            return None
        if itself.st_ino != mark.inode or Path(mark.path).name != place.name:
            return None  # a copy, or a folder that the user has renamed
        stack.pop_all()
    return Marked(place, mark, folder, parent, file)


class Claim:
    """The mark of a folder that this process has just made, locked until the process ends."""

    def __init__(self, path: Path, owner: Owner, run: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(path / MARK, flags, 0o600)
        inode, now = path.stat().st_ino, time.time()
        self.mark = Mark(
            kind="folder of an autoddp run",
            owner=owner,
            run=run,
            path=str(path),
            inode=inode,
            made=now,
            locked=self._lock(),
            folders=(),
            ended=False,
        )
        self._size = 0
        self._write()

    def change(self, **values: Any) -> None:
        """Write the mark again, with other values for some of its fields. OSError where that is not possible."""
        self.mark = replace(self.mark, **values)
        self._write()

    def close(self) -> None:
        """Release the lock, once the folder is gone."""
        os.close(self._file)

    def _write(self) -> None:
        """Write the mark into its file, which stays locked: in one write, never shorter, so no reader sees a mix."""
        text = self.mark.text().encode().ljust(self._size)
        os.pwrite(self._file, text, 0)
        self._size = len(text)

    def _lock(self) -> bool:
        for _ in range(_LOCK_TRIES):
            locked = _try_to_lock(self._file)
            if locked is not False:
                return bool(locked)
            time.sleep(_BETWEEN_TRIES)
        return False


def _content(file: int) -> Mark | None:
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_uid != os.geteuid():
        return None
    return Mark.parse(os.pread(file, _LARGEST, 0)) if found.st_size < _LARGEST else None


def _try_to_lock(file: int) -> bool | None:
    """True: locked. False: another process has the lock. None: the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_running(pid: int, started: str) -> bool:
    """Whether a process with that id and that start is running; True where that is unknown."""
    now = _started(pid)
    with contextlib.suppress(OverflowError):  # no system has such an id
        return psutil.pid_exists(pid) and (not (started and now) or now == started)
    return False


def _started(pid: int) -> str:
    """When a process started; "" if that is unknown, "ended" for one whose parent has not collected it yet."""
    if sys.platform != "linux":
        with contextlib.suppress(psutil.Error):
            return str(psutil.Process(pid).create_time())
        return ""
    # psutil computes a date, which changes when the system's clock is set. The kernel's ticks since boot do not.
    try:
        # the name, in parentheses, may hold anything
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "ended" if words[0] in "ZX" else words[19]


def _boot_id() -> str:
    """Elsewhere than on Linux `_started` gives a date, which needs none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _pid_namespace() -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def marked_in(place: str | os.PathLike[str], prefix: str = "") -> Iterator[Marked]:
    """The marked folders of this user directly in `place`, each closed again when the next one is asked for."""
    try:
        with os.scandir(place) as entries:
            names = sorted(e.name for e in entries if e.name.startswith(prefix) and e.is_dir(follow_symlinks=False))
    except OSError:
        return
    root = Path(os.path.realpath(place))
    for name in names:
        marked = read_mark(root / name)
        if marked is not None:
            with contextlib.closing(marked):
                yield marked
