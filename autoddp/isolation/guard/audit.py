"""The last check: Python reports as audit events what it is about to open, change or start, whoever asks for it.

The guard's own operations are reported too. They are told apart by their path, which lies in the scratch folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from autoddp.isolation import real
from autoddp.isolation.guard.opening import CHANGES, announced
from autoddp.isolation.guard.paths import is_path, text
from autoddp.isolation.guard.sockets import is_abstract
from autoddp.isolation.guard.view import View
from autoddp.isolation.hooks import check_events
from autoddp.isolation.pipes import Pipes

_SET_FLAGS = {0x40086602, 0x40046602, 0x401C5820}  # FS_IOC_SETFLAGS of 64 and 32 bits, FS_IOC_FSSETXATTR


class Audit:
    """Checks the events that name a file; `more` are checks by event of programs and of native code."""

    def __init__(self, view: View, pipes: Pipes, more: Mapping[str, Callable[..., None]]) -> None:
        self.view = view
        self.pipes = pipes
        self._direct = tuple(f"{folder.rstrip('/')}/" for folder in view.direct)
        self._checks: dict[str, Callable[..., None]] = {
            # Functions of one path, each with the position of its `dir_fd` among the arguments that follow the path.
            "os.remove": self._one_path("os.remove", 0, follow=False),
            "os.rmdir": self._one_path("os.rmdir", 0, follow=False),
            "os.mkdir": self._one_path("os.mkdir", 1, follow=False),
            "os.chmod": self._one_path("os.chmod", 1),
            "os.chown": self._one_path("os.chown", 2),
            "os.utime": self._one_path("os.utime", 2),
            "os.chflags": self._one_path("os.chflags"),
            "os.setxattr": self._one_path("os.setxattr"),
            "os.removexattr": self._one_path("os.removexattr"),
            "os.chroot": self._one_path("os.chroot"),
            "os.truncate": self._truncate,
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
        """Check audit events from now on."""
        check_events(self._checks)

    def _refuse_outside(self, what: str, path: Any, dir_fd: int = -1, follow: bool = True) -> None:
        """End tuning unless a path, as the kernel follows it, lies where writes are real."""
        if isinstance(path, int):
            if path < 0:
                return
            found = real.path_of(path)
            if found.startswith("/") and not found.endswith(" (deleted)"):
                self._refuse_outside(what, found)
            return
        name = text(path)
        if self.view.in_scratch(name):
            return
        try:
            base = "" if name.startswith("/") else (real.getcwd() if dir_fd < 0 else real.path_of(dir_fd)) + "/"
            if self.view.in_scratch(base) and ".." not in name.split("/"):
                return
            place = self.view.resolve(base + (name.rstrip("/") or "/"), False, real_only=True)
            final = self.view.resolve(place.path, True, real_only=True) if follow and place.is_link else place
        except OSError:
            return  # the kernel will not find it either
        for each in (place.path, final.path):
            device = each.startswith("/dev/") and not each.startswith("/dev/shm/")
            if not device and not (each + "/").startswith(self._direct):
                self.view.stop(f"{what} changes {each}")

    def _one_path(self, event: str, dir_fd_at: int | None = None, follow: bool = True) -> Callable[..., None]:
        def check(path: Any, *more: Any) -> None:
            dir_fd = more[dir_fd_at] if dir_fd_at is not None and len(more) > dir_fd_at else -1
            self._refuse_outside(event, path, dir_fd, follow)

        return check

    def _truncate(self, path: Any, _length: int) -> None:
        if not isinstance(path, int):  # a descriptor was opened for writing, and so checked
            self._refuse_outside("os.truncate", path)

    def _open(self, path: Any, mode: Any, flags: int) -> None:
        if not is_path(path):
            return
        if mode is not None and announced.path is not None and path == announced.path:
            return  # Python's `open`, which then calls the guard's opener; the event of that one has no mode
        name = text(path)
        if self.view.in_scratch(name):
            return
        self.pipes.require_own(name, flags, self.view.stop)
        if not flags & CHANGES:
            return
        try:
            place = self.view.resolve(name, real_only=True) if name.startswith("/") else None
        except OSError:
            place = None
        # An own pipe or a device may be opened for writing anywhere: nothing in the file system changes.
        if place is None or not place.exists or place.is_file or place.is_folder or place.is_link:
            self._refuse_outside("open", name)

    def _rename(self, source: Any, target: Any, source_fd: int = -1, target_fd: int = -1) -> None:
        self._refuse_outside("os.rename", source, source_fd, follow=False)
        self._refuse_outside("os.rename", target, target_fd, follow=False)

    def _link(self, source: Any, target: Any, source_fd: int = -1, target_fd: int = -1) -> None:
        self._refuse_outside("os.link", source, source_fd)  # a second name is a second way to write
        self._refuse_outside("os.link", target, target_fd, follow=False)

    def _symlink(self, _source: Any, target: Any, dir_fd: int = -1) -> None:
        self._refuse_outside("os.symlink", target, dir_fd, follow=False)

    def _sqlite(self, database: Any) -> None:
        name = text(database)
        if name in ("", ":memory:") or "mode=ro" in name or "mode=memory" in name or "immutable=1" in name:
            return
        self._refuse_outside("sqlite3.connect", name.removeprefix("file:").partition("?")[0])

    def _bind(self, _socket: Any, address: Any) -> None:
        if isinstance(address, (str, bytes)) and not is_abstract(address):
            name = os.fsdecode(address)
            if not name.startswith("/proc/self/fd/"):
                self._refuse_outside("socket.bind", name)

    def _ioctl(self, descriptor: Any, request: int, *_more: Any) -> None:
        if request & 0xFFFFFFFF in _SET_FLAGS:
            self._refuse_outside("fcntl.ioctl", descriptor if isinstance(descriptor, int) else descriptor.fileno())
