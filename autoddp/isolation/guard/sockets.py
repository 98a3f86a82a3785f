"""Unix sockets with a path, such as those between the processes of `multiprocessing`: they lie in the scratch."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from autoddp.isolation.guard import real
from autoddp.isolation.guard.changes import Changes
from autoddp.isolation.guard.paths import text

_LONGEST = 100  # bytes; the kernel takes 107, macOS 103


class Sockets:
    """Patches `socket.socket`."""

    def __init__(self, changes: Changes) -> None:
        self.changes = changes
        self.overlay = changes.overlay
        self._bound: dict[int, Any] = {}

    def patch(self, module: ModuleType) -> None:
        """Called when `socket` has been imported."""
        kind = module.socket
        bind, name = kind.bind, kind.getsockname

        def bound(this: Any, address: Any) -> Any:
            if not self._has_path(module, this, address):
                return bind(this, address)
            with self.changes.turns.taken():
                place = self.overlay.resolve(text(address), False)
                if place.exists or place.through:
                    return self._reach(place.physical, lambda at: bind(this, at))
                self.changes.check_entries(place)
                assert place.folder is not None
                self.changes.ensure(place.folder)
                self.changes.turns.begin()
                self.changes.clear(self.changes.above(place))
                self._reach(self.changes.above(place), lambda at: bind(this, at))
            self._bound[real.fstat(this.fileno()).st_ino] = address

        def named(this: Any) -> Any:
            found = name(this)
            if isinstance(found, (str, bytes)) and found:
                return self._bound.get(real.fstat(this.fileno()).st_ino, found)
            return found

        bound.__name__, named.__name__ = "bind", "getsockname"
        kind.bind, kind.getsockname = bound, named
        for each in ("connect", "connect_ex"):
            setattr(kind, each, self._connecting(module, getattr(kind, each)))

    def _connecting(self, module: ModuleType, connect: Any) -> Any:
        def connected(this: Any, address: Any) -> Any:
            if not self._has_path(module, this, address):
                return connect(this, address)
            try:
                physical = self.overlay.resolve(text(address)).physical
            except OSError:
                return connect(this, address)
            return self._reach(physical, lambda at: connect(this, at))

        connected.__name__ = connect.__name__
        return connected

    @staticmethod
    def _has_path(module: ModuleType, this: Any, address: Any) -> bool:
        unix = getattr(module, "AF_UNIX", None)
        return bool(this.family == unix) and _is_path(address)

    @staticmethod
    def _reach(path: str, use: Any) -> Any:
        """A path that is too long for a socket is reached through its folder's descriptor."""
        if len(os.fsencode(path)) <= _LONGEST or not real.LINUX:
            return use(path)
        folder = real.open(os.path.dirname(path), os.O_PATH | os.O_CLOEXEC)
        try:
            return use(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
        finally:
            real.close(folder)


def _is_path(address: Any) -> bool:
    """Not an abstract name of Linux, which begins with a zero byte."""
    return isinstance(address, (str, bytes, os.PathLike)) and os.fsencode(address)[:1] not in (b"", b"\0")
