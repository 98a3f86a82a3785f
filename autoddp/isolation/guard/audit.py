"""The last wall: Python tells before it opens, changes or starts anything, whoever asks for it.

The guard's own operations pass here too and are told apart by their path, which lies in the scratch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from autoddp.isolation.guard import real
from autoddp.isolation.guard.changes import Changes
from autoddp.isolation.guard.opening import announced
from autoddp.isolation.guard.paths import text
from autoddp.isolation.guard.redirection import Overlay

_SET_FLAGS = {0x40086602, 0x40046602, 0x401C5820}  # FS_IOC_SETFLAGS of 64 and 32 bits, FS_IOC_FSSETXATTR


class Audit:
    """Checks the events that name a file; `doors` adds those that start programs and load libraries."""

    def __init__(self, changes: Changes, more: dict[str, Callable[..., None]]) -> None:
        self.changes = changes
        self.overlay: Overlay = changes.overlay
        self._inside = tuple(f"{root.rstrip('/')}/" for root in (*self.overlay.roots, "/dev"))
        one = {name: self._one(name) for name in ("remove", "rmdir", "chmod", "chown", "chflags", "utime", "truncate")}
        one |= {name: self._one(name) for name in ("mkdir", "setxattr", "removexattr", "chroot")}
        self._checks: dict[str, Callable[..., None]] = {
            **{f"os.{name}": check for name, check in one.items()},
            "open": self._open,
            "os.rename": self._rename,
            "os.link": self._link,
            "os.symlink": self._symlink,
            "sqlite3.connect": self._sqlite,
            "socket.bind": self._bind,
            "fcntl.ioctl": self._ioctl,
            **more,
        }

    def start(self) -> None:
        """From now on, for good: an audit hook cannot be removed."""
        checks = self._checks

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            check = checks.get(event)
            if check is not None:
                check(*arguments)

        sys.addaudithook(hook)

    def refuse_outside(self, what: str, path: Any, dir_fd: int = -1, follow: bool = True) -> None:
        """Stop unless a path, as the kernel follows it, lies where writes are real."""
        if isinstance(path, int):
            if path < 0:
                return
            found = real.path_of(path)
            if found.startswith("/") and not found.endswith(" (deleted)"):
                self.refuse_outside(what, found)
            return
        name = text(path)
        if name.startswith(self.overlay.scratch + "/"):
            return
        try:
            base = "" if name.startswith("/") else (real.getcwd() if dir_fd < 0 else real.path_of(dir_fd)) + "/"
            if base.startswith(self.overlay.scratch + "/") and ".." not in name.split("/"):
                return
            place = self.overlay.resolve(base + (name.rstrip("/") or "/"), False, real_only=True)
            final = self.overlay.resolve(place.path, True, real_only=True) if follow and place.is_link else place
        except OSError:
            return  # the kernel will not find it either
        for each in (place.path, final.path):
            if not (each + "/").startswith(self._inside):
                self.changes.stop(f"{what} changes {each}")

    def _one(self, name: str) -> Callable[..., None]:
        dir_fd_at = {"remove": 1, "rmdir": 1, "mkdir": 2, "chmod": 2, "chown": 3, "utime": 3}.get(name)
        cuts_descriptor = name == "truncate"  # it was opened for writing, and so seen

        def check(path: Any, *more: Any) -> None:
            if cuts_descriptor and isinstance(path, int):
                return
            dir_fd = more[dir_fd_at - 1] if dir_fd_at is not None and len(more) >= dir_fd_at else -1
            self.refuse_outside(f"os.{name}", path, dir_fd, follow=name not in ("remove", "rmdir", "mkdir"))

        return check

    def _open(self, path: Any, mode: Any, flags: int) -> None:
        if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) or isinstance(path, int):
            return
        if announced.path is not None and path == announced.path:
            return  # Python's open, which then asks the guard's opener
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        self._refuse_file("open", path)

    def _refuse_file(self, what: str, path: Any) -> None:
        """A pipe or a device may be opened for writing anywhere: nothing in the file system changes."""
        name = text(path)
        if name.startswith(self.overlay.scratch + "/"):
            return
        try:
            place = self.overlay.resolve(name, real_only=True) if name.startswith("/") else None
        except OSError:
            place = None
        if place is None or not place.exists or place.is_file or place.is_folder or place.is_link:
            self.refuse_outside(what, name)

    def _rename(self, source: Any, target: Any, source_fd: int = -1, target_fd: int = -1) -> None:
        self.refuse_outside("os.rename", source, source_fd, follow=False)
        self.refuse_outside("os.rename", target, target_fd, follow=False)

    def _link(self, source: Any, target: Any, source_fd: int = -1, target_fd: int = -1) -> None:
        self.refuse_outside("os.link", source, source_fd)  # a second name is a second way to write
        self.refuse_outside("os.link", target, target_fd, follow=False)

    def _symlink(self, source: Any, target: Any, dir_fd: int = -1) -> None:
        self.refuse_outside("os.symlink", target, dir_fd, follow=False)

    def _sqlite(self, database: Any) -> None:
        name = text(database)
        if name in ("", ":memory:") or "mode=ro" in name or "mode=memory" in name or "immutable=1" in name:
            return
        self.refuse_outside("sqlite3.connect", name.removeprefix("file:").partition("?")[0])

    def _bind(self, _socket: Any, address: Any) -> None:
        if isinstance(address, (str, bytes)) and os.fsencode(address)[:1] not in (b"", b"\0"):
            name = os.fsdecode(address)
            if not name.startswith("/proc/self/fd/"):
                self.refuse_outside("socket.bind", name)

    def _ioctl(self, descriptor: Any, request: int, *_more: Any) -> None:
        if request & 0xFFFFFFFF in _SET_FLAGS:
            self.refuse_outside("fcntl.ioctl", descriptor if isinstance(descriptor, int) else descriptor.fileno())
