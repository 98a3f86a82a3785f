"""POSIX shared memory and named semaphores, which `multiprocessing` makes: the script may use those that it has made.

torch makes shared memory too, for tensors under the sharing strategy "file_system".

All programs of the machine share their names, and native code must find them, so nothing is redirected. What another
program has made stays as it is: tuning ends before it is opened to be written, or removed. What the script makes is
listed in a file, with its inode number and its name in each line, because ranks that are killed do not remove it: the
keeper does.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from autoddp.isolation import real
from autoddp.isolation.guard.opening import CHANGES
from autoddp.isolation.guard.view import View
from autoddp.isolation.hooks import when_imported

_FOLDER = "/dev/shm"
_NEW = os.O_CREAT | os.O_EXCL
_TRACKER = "multiprocessing.resource_tracker"


class SharedMemory:
    """Checks the functions of Python's two modules in C when the script imports them; `listed` is the file's path."""

    def __init__(self, view: View, listed: str) -> None:
        self.view = view
        self._listed = listed
        self._known: set[bytes] = set()
        self._read = 0  # bytes of the file that are in `_known`
        self._shm_open: Callable[..., int] | None = None
        # The tracker removes what a process that has ended has left. What is not the script's is none of its business.
        self._is_tracker = any(_TRACKER in word for word in sys.orig_argv)

    def start(self) -> None:
        """Wait for the modules."""
        when_imported("_posixshmem", self._patch_memory)
        when_imported("_multiprocessing", self._patch_semaphores)
        when_imported("torch", self._patch_torch)

    def _patch_memory(self, module: ModuleType) -> None:
        opened, unlink = module.shm_open, module.shm_unlink

        @functools.wraps(opened)
        def shm_open(path: str, flags: int, mode: int = 0o777) -> Any:
            return self._open(opened, path, flags, mode)

        @functools.wraps(unlink)
        def shm_unlink(path: str) -> Any:
            return self._unlink(unlink, path, "")

        module.shm_open, module.shm_unlink = shm_open, shm_unlink  # type: ignore[attr-defined]
        self._shm_open = opened

    def _patch_semaphores(self, module: ModuleType) -> None:
        kind, unlink = getattr(module, "SemLock", None), getattr(module, "sem_unlink", None)
        if kind is None or unlink is None or not real.LINUX:  # only Linux has files of them
            return

        def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
            made = kind.__new__(cls, *args, **kwargs)  # it fails if the name is there already
            if made.name is not None:  # else it has no name any more, and vanishes with its processes
                with self.view.lock.held():
                    self._list("sem." + made.name.lstrip("/"))
            return made

        @functools.wraps(unlink)
        def sem_unlink(name: str) -> Any:
            return self._unlink(unlink, name, "sem.")

        space = {"__new__": make, "__module__": kind.__module__, "__doc__": kind.__doc__}
        module.SemLock = type(kind.__name__, (kind,), space)  # type: ignore[attr-defined]
        module.sem_unlink = sem_unlink  # type: ignore[attr-defined]

    def _patch_torch(self, torch: ModuleType) -> None:
        """List each tensor's memory when it gets a name. torch's own process, which would remove it, is killed too."""
        kind = torch.UntypedStorage
        share, make = kind._share_filename_cpu_, kind._new_using_filename_cpu

        @functools.wraps(share)
        def shared(storage: Any, *args: Any, **kwargs: Any) -> Any:
            has_a_name = storage.is_shared()  # whoever gave it has listed it
            found = share(storage, *args, **kwargs)
            if not has_a_name:
                list_name(found)
            return found

        def new(size: int) -> Any:
            storage = make(size)
            list_name(share(storage))
            return storage

        def list_name(handles: tuple[bytes, bytes, int]) -> None:
            with self.view.lock.held():
                self._list(os.fsdecode(handles[1]).lstrip("/"))

        kind._share_filename_cpu_, kind._new_using_filename_cpu = shared, staticmethod(new)

    def _open(self, opened: Callable[..., Any], path: str, flags: int, mode: int) -> Any:
        name = _plain(path)
        if name is None:
            return opened(path, flags, mode)
        with self.view.lock.held():
            status = self._status(name)
            self._check_view(name, status)
            if status is None and flags & os.O_CREAT:
                try:
                    descriptor = opened(path, flags | os.O_EXCL, mode)  # so that what is listed is surely the script's
                except FileExistsError:
                    if flags & os.O_EXCL:
                        raise
                    self._stop(name, "opens to write")
                self._list(name)
                return descriptor
            refused = flags & _NEW == _NEW  # by the kernel, because the name is there
            if status is not None and flags & CHANGES and not refused and not self._is_ours(name, status):
                self._stop(name, "opens to write")
            return opened(path, flags, mode)

    def _unlink(self, unlink: Callable[..., Any], path: str, prefix: str) -> Any:
        plain = _plain(path)
        if plain is None:
            return unlink(path)
        name = prefix + plain
        with self.view.lock.held():
            status = self._status(name)
            if status is not None and not self._is_ours(name, status):
                if self._is_tracker:
                    return None
                self._stop(name, "removes")
            if not self._is_tracker:
                self._check_view(name, status)
            return unlink(path)

    def _stop(self, name: str, what: str) -> NoReturn:
        self.view.stop(f"the script {what} shared memory of another program ({_FOLDER}/{name})")

    def _check_view(self, name: str, status: real.Status | None) -> None:
        """Shared memory is no part of the view: end tuning if the script has changed the file by a file operation."""
        if not real.LINUX:
            return
        try:
            place = self.view.resolve(f"{_FOLDER}/{name}", follow=False)
        except OSError:
            return
        if place.upper or place.exists != (status is not None):
            self.view.stop(f"the script uses {_FOLDER}/{name} both as a file and as shared memory")

    def _status(self, name: str) -> real.Status | None:
        if self._shm_open is None or real.LINUX:
            return real.status_or_none(f"{_FOLDER}/{name}")
        return _status_by_opening(self._shm_open, name)

    def _is_ours(self, name: str, status: real.Status) -> bool:
        """Whether a process of this attempt has made it. The inode tells: another program may take a name again."""
        new = b""
        with contextlib.suppress(FileNotFoundError), real.opened(self._listed, os.O_RDONLY) as file:
            os.lseek(file, self._read, os.SEEK_SET)
            while block := real.read(file, 1 << 20):
                new += block
        self._read += len(new)
        self._known.update(new.splitlines(keepends=True))
        return _line(name, status) in self._known

    def _list(self, name: str) -> None:
        status = self._status(name)
        if status is not None:
            with real.opened(self._listed, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as file:
                real.write(file, _line(name, status))


def _line(name: str, status: real.Status) -> bytes:
    return b"%d %s\n" % (status.st_ino, os.fsencode(name))


def _plain(path: object) -> str | None:
    """The name in /dev/shm; None if this is none, which the function itself refuses."""
    name = path.lstrip("/") if isinstance(path, str) else ""
    return None if name in ("", ".", "..") or "/" in name or "\0" in name else name


def _status_by_opening(opened: Callable[..., int], name: str) -> real.Status | None:
    """The status of shared memory on systems where it is in no folder; None if it is not there."""
    try:
        descriptor = opened("/" + name, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return real.fstat(descriptor)
    finally:
        real.close(descriptor)
