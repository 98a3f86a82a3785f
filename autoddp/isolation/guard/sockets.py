"""Unix sockets with a path, such as those of `multiprocessing`, are made in the scratch folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from autoddp.isolation import real
from autoddp.isolation.guard.paths import is_path
from autoddp.isolation.guard.view import View
from autoddp.isolation.hooks import when_imported

_LONGEST = 100  # bytes of a socket's path; the kernel takes 107, macOS 103


class Sockets:
    """Patches `socket.socket` when the script imports it."""

    def __init__(self, view: View) -> None:
        self.view = view
        self._bound: dict[int, Any] = {}

    def start(self) -> None:
        """Wait for the module."""
        when_imported("socket", self._patch)

    def _patch(self, module: ModuleType) -> None:
        kind, unix = module.socket, getattr(module, "AF_UNIX", None)
        bind, getsockname = kind.bind, kind.getsockname

        def has_path(this: Any, address: Any) -> bool:
            return bool(this.family == unix) and is_path(address) and not is_abstract(address)

        def bound(this: Any, address: Any) -> Any:
            if not has_path(this, address):
                return bind(this, address)
            with self.view.lock.held():
                place = self.view.resolve(address, False)
                if place.exists or place.direct:
                    return _within_limit(place.physical, lambda at: bind(this, at))
                self.view.check_entries(place)
                self.view.ensure(place.folder)
                self.view.lock.begin_change()
                self.view.clear(self.view.above(place))
                _within_limit(self.view.above(place), lambda at: bind(this, at))
            self._bound[real.fstat(this.fileno()).st_ino] = address

        def named(this: Any) -> Any:
            found = getsockname(this)
            if isinstance(found, (str, bytes)) and found:
                return self._bound.get(real.fstat(this.fileno()).st_ino, found)
            return found

        def connecting(connect: Any) -> Any:
            def connected(this: Any, address: Any) -> Any:
                if not has_path(this, address):
                    return connect(this, address)
                try:
                    physical = self.view.resolve(address).physical
                except OSError:
                    return connect(this, address)
                return _within_limit(physical, lambda at: connect(this, at))

            return connected

        new = {"bind": bound, "getsockname": named}
        new |= {name: connecting(getattr(kind, name)) for name in ("connect", "connect_ex")}
        for name, function in new.items():
            function.__name__ = name
            setattr(kind, name, function)


def is_abstract(address: Any) -> bool:
    """Whether a Unix socket's address is no path: empty, or a name of Linux that begins with a zero byte."""
    return os.fsencode(address)[:1] in (b"", b"\0")


def _within_limit(path: str, use: Callable[[str], Any]) -> Any:
    """Call `use` with the path; one that is too long for a socket is reached through its folder's descriptor."""
    if len(os.fsencode(path)) <= _LONGEST or not real.LINUX:
        return use(path)
    with real.opened(os.path.dirname(path), os.O_PATH) as folder:
        return use(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
