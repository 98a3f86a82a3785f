"""Who made a folder, and whether that launcher still lives.

A run's folder, and each private folder that it makes elsewhere, hold a file `owner.json`: the *mark*. It names the
launcher by host, boot, process id and start of the process, and the folder itself by path and inode, so that a copy or
a renamed folder is not taken for the original. The launcher holds a lock on the file as long as it lives: process ids
say nothing across containers, and hosts may share a name.

    folder = read_mark("/tmp/autoddp-1f2e3d4c")      # None unless it is marked, and by this user
    if folder is not None and folder.may_be_cleaned():
        ...
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from autoddp.codec import Meta, Struct, decode, encode, replace

MARK = "owner.json"
_LARGEST = 2**16  # bytes of a mark; ours have less than 4 KiB
_PATIENCE = 20  # tries for the lock on a mark that somebody is just looking at
_BETWEEN_TRIES = 0.01  # seconds; a look takes less than one millisecond
_ASKING = 10  # seconds for sysctl or ps, which answer at once on a machine that is well


Word = Annotated[str, Meta(pattern=r"^[^\0]*\Z")]
"""A text that may be a path: the mark comes from a file, and the system calls refuse a NUL."""
Number = Annotated[int, Meta(gt=0)]
Moment = Annotated[float, Meta(gt=0, lt=1e12)]
"""Seconds since 1970: no infinity, and nothing that is no number."""


class Owner(Struct, frozen=True, forbid_unknown_fields=True):
    """A launcher, told apart from every other one."""

    host: Word
    boot_id: Word
    """"" where the system has none."""
    pid: Number
    started: Word
    """When the process started, in the system's own words; "" if they cannot be had."""
    pid_namespace: Word
    """Where `pid` means something: containers count their processes from 1 each."""

    @classmethod
    def of_this_process(cls) -> Owner:
        """This process."""
        pid = os.getpid()
        return cls(socket.gethostname(), _boot_id(), pid, _started(pid), _pid_namespace())

    def is_here(self) -> bool:
        """Whether it ran on this host."""
        return self.host == socket.gethostname()


class Mark(Struct, frozen=True, forbid_unknown_fields=True):
    """What `owner.json` says. No field may be absent."""

    kind: Literal["folder of an autoddp run"]
    owner: Owner
    run: Word
    """Name of the run folder."""
    path: Word
    """The marked folder, without links in its path."""
    inode: Number
    made: Moment
    locked: bool
    """Whether the owner holds a lock on the file; some network file systems have none."""
    folders: tuple[Word, ...]
    """In a run folder: the private folders elsewhere that belong to it."""
    ended: bool
    """The launcher said at its own end that it is gone."""

    def text(self) -> str:
        """The file's content."""
        return encode(self, indent=1) + "\n"

    @classmethod
    def parse(cls, text: bytes) -> Mark | None:
        """None for anything but a mark, down to the type of each value."""
        with contextlib.suppress(ValueError):
            return decode(text, cls)
        return None


@dataclass
class Marked:
    """A folder with a mark that names this very folder, open; `close` it."""

    path: Path
    mark: Mark
    folder: int
    _parent: int
    _file: int

    def close(self) -> None:
        """Give up the lock too, if `may_be_cleaned` took it."""
        for handle in (self._file, self.folder, self._parent):
            os.close(handle)

    def may_be_cleaned(self) -> bool:
        """Whether its owner ran on this host and is gone. Afterwards it is locked, so that others keep off."""
        return self.mark.owner.is_here() and (self.has_ended() or self._is_dead())

    def has_ended(self) -> bool:
        """Whether its owner, on whatever host, ended in order: nobody uses it."""
        return self.mark.ended and self._lock() is not False

    def remove_itself(self) -> bool:
        """Remove the mark and the folder, which must be empty otherwise. The mark goes last of all files."""
        try:
            here = os.stat(self.path.name, dir_fd=self._parent, follow_symlinks=False)
            if not os.path.samestat(here, os.fstat(self.folder)) or os.listdir(self.folder) != [MARK]:
                return False
            os.unlink(MARK, dir_fd=self.folder)
            os.rmdir(self.path.name, dir_fd=self._parent)
        except OSError:
            return False
        return True

    def _is_dead(self) -> bool:
        free = self._lock()
        owner = self.mark.owner
        if free is False or (free is None and self.mark.locked):
            return False
        if owner.boot_id and _boot_id() and owner.boot_id != _boot_id():
            return True
        if owner.pid_namespace != _pid_namespace():
            return self.mark.locked  # its process id means nothing here, its lock does
        return not _lives(owner.pid, owner.started)

    def _lock(self) -> bool | None:
        """True: taken. False: the owner has it, or another launcher that is cleaning. None: no locks here."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        return True


def read_mark(path: str | os.PathLike[str]) -> Marked | None:
    """The marked folder `path`. None where anything is not as this module writes it, or not of this user."""
    place = Path(path)
    with contextlib.ExitStack() as stack:

        def held(name: str, flags: int, inside: int | None = None) -> int:
            handle = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)
            stack.callback(os.close, handle)
            return handle

        try:
            if os.path.realpath(place) != str(place):
                return None
            parent = held(str(place.parent), os.O_RDONLY | os.O_DIRECTORY)
            folder = held(place.name, os.O_RDONLY | os.O_DIRECTORY, parent)
            # for writing: some network file systems lock only what may be written. A pipe would not block.
            file = held(MARK, os.O_RDWR | os.O_NONBLOCK, folder)
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
        locked = self._locked()
        inode, now = path.stat().st_ino, time.time()
        self.mark = Mark("folder of an autoddp run", owner, run, str(path), inode, now, locked, (), False)
        self._size = 0
        self._write()

    def change(self, **values: Any) -> None:
        """Write the mark anew, with other values for some of its fields. OSError where that is not possible."""
        self.mark = replace(self.mark, **values)
        self._write()

    def close(self) -> None:
        """Give up the lock: for a folder that is gone."""
        os.close(self._file)

    def _write(self) -> None:
        """In place, so that the lock stays; in one write, and never shorter, so that no reader finds half of two."""
        text = self.mark.text().encode().ljust(self._size)
        os.pwrite(self._file, text, 0)
        self._size = len(text)

    def _locked(self) -> bool:
        for _ in range(_PATIENCE):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_BETWEEN_TRIES)
            except OSError:
                return False
            else:
                return True
        return False


def _content(file: int) -> Mark | None:
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_uid != os.geteuid():
        return None
    return Mark.parse(os.pread(file, _LARGEST, 0)) if found.st_size < _LARGEST else None


def _lives(pid: int, started: str) -> bool:
    """Whether a process with that id and that start lives; True where it cannot be known."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    now = _started(pid)
    if now == _ENDED:
        return False
    return not (started and now) or now == started


_ENDED = "ended"
"""Of a process that is gone, or waits only for its parent to take notice."""


def _started(pid: int) -> str:
    """The kernel's words for when a process started; "" if they cannot be had."""
    if sys.platform == "linux":
        try:
            # the name, in parentheses, may hold anything
            words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except FileNotFoundError:
            return _ENDED if Path("/proc/self/stat").exists() else ""
        except OSError:
            return ""
        return _ENDED if words[0] in "ZX" else words[19]  # ticks since boot
    return " ".join(_said(["ps", "-o", "lstart=", "-p", str(pid)]).split())


def _boot_id() -> str:
    """Another one after each start of the machine; "" if there is none."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return ""
    return _said(["sysctl", "-n", "kern.bootsessionuuid"])


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _said(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASKING, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


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
