"""`sqlite3` and `dbm`, which open files in C: a database of the script's is a copy in the scratch."""

from __future__ import annotations

import functools
import os
import urllib.parse
from types import ModuleType
from typing import Any

from autoddp.isolation.guard import real
from autoddp.isolation.guard.imports import Watcher
from autoddp.isolation.guard.install import rebind
from autoddp.isolation.guard.native import Native
from autoddp.isolation.guard.paths import Path, text

_ATTACH, _OK = 24, 0  # of SQLite's authorizer
_SIBLINGS = ("-wal", "-journal")
_TWO_FILES = (".db", ".dir", ".pag")


class Databases:
    """Patches the modules when the script imports them."""

    def __init__(self, native: Native) -> None:
        self.native = native
        self.overlay = native.overlay
        self.stop = native.changes.stop

    def start(self, watcher: Watcher) -> None:
        """Wait for the modules."""
        watcher.when_imported("sqlite3", self.patch_sqlite)
        watcher.when_imported("dbm.gnu", self.patch_gnu)
        watcher.when_imported("dbm.ndbm", self.patch_ndbm)

    def patch_sqlite(self, sqlite: ModuleType) -> None:
        """`sqlite3.connect` and `sqlite3.Connection`; `dbm.sqlite3` uses the former."""
        original, databases = sqlite.Connection, self

        class Connection(original):  # type: ignore[misc, valid-type]
            def __init__(self, database: Path, *args: Any, **kwargs: Any) -> None:
                uri = kwargs.get("uri", args[6] if len(args) > 6 else False)
                super().__init__(databases.database(database, bool(uri)), *args, **kwargs)
                super().set_authorizer(databases.authorize)

            def set_authorizer(self, *args: Any, **kwargs: Any) -> Any:
                databases.stop("sqlite3.Connection.set_authorizer, in whose place the guard watches ATTACH")

            def enable_load_extension(self, *args: Any, **kwargs: Any) -> Any:
                databases.stop("sqlite3.Connection.enable_load_extension")

        Connection.__module__, Connection.__qualname__ = "sqlite3", "Connection"
        connect = sqlite.connect

        @functools.wraps(connect)
        def connected(database: Path, *args: Any, **kwargs: Any) -> Any:
            factory = kwargs.get("factory", args[4] if len(args) > 4 else None)
            if factory is None or factory is original:
                kwargs["factory"] = Connection
                if len(args) > 4:
                    args = (*args[:4], Connection, *args[5:])
                    del kwargs["factory"]
            elif not issubclass(factory, Connection):
                self.stop(f"sqlite3.connect to {database!r} with a class made before the guard was there")
            return connect(database, *args, **kwargs)

        rebind({id(connect): (connect, connected), id(original): (original, Connection)})

    def authorize(self, action: int, first: str | None, *rest: Any) -> int:
        """SQLite asks while it compiles a statement; ATTACH and VACUUM INTO open another file."""
        if action == _ATTACH and first not in ("", ":memory:"):
            self.stop(f"sqlite3 attaches {first or 'a file'}, which the guard does not redirect")
        return _OK

    def database(self, given: Path, uri: bool) -> Path:
        """What to open instead."""
        name = text(given)
        if name in ("", ":memory:"):
            return given
        if not uri or not name.startswith("file:"):
            return self._copied(name)
        parts = urllib.parse.urlsplit(name)
        options = dict(urllib.parse.parse_qsl(parts.query))
        path = urllib.parse.unquote(parts.path)
        if path in ("", ":memory:") or options.get("mode") == "memory" or options.get("vfs") == "memdb":
            return given
        if options.get("mode") == "ro" or options.get("immutable") == "1":
            found = self._read_only(path)
            if found is not None:
                return f"file:{urllib.parse.quote(found)}?{parts.query}"
        return f"file:{urllib.parse.quote(self._copied(path))}?{parts.query}"

    def _read_only(self, path: str) -> str | None:
        """The real file, if SQLite makes no other file beside it."""
        place = self.overlay.resolve(path)
        if not place.is_file or not place.is_real:
            return None
        descriptor = real.open(place.physical, os.O_RDONLY | os.O_CLOEXEC)
        try:
            keeps_a_log = real.read(descriptor, 20)[18:] == b"\2\2"
        finally:
            real.close(descriptor)
        beside = [real.status_or_none(place.physical + more) for more in _SIBLINGS]
        return None if keeps_a_log or any(beside) else place.physical

    def _copied(self, path: str) -> str:
        for more in _SIBLINGS:
            if self.overlay.resolve(path).exists and self.overlay.resolve(path + more).exists:
                self.native.to_write(path + more, keep=True)
        return str(self.native.to_write(path, keep=True))

    def patch_gnu(self, gnu: ModuleType) -> None:
        """`dbm.gnu.open`: one file."""
        original = gnu.open

        @functools.wraps(original)
        def opened(filename: Path, flag: str = "r", *args: Any) -> Any:
            if flag.startswith("r"):
                return original(self.native.to_read(filename), flag, *args)
            self._must_exist(filename, flag, gnu.error)
            return original(self.native.to_write(filename, keep="n" not in flag), flag, *args)

        gnu.__dict__["open"] = opened

    def patch_ndbm(self, ndbm: ModuleType) -> None:
        """`dbm.ndbm.open`: the library adds an ending to the name, which one depends on how it was built."""
        original = ndbm.open

        @functools.wraps(original)
        def opened(filename: Path, flag: str = "r", *args: Any) -> Any:
            name = text(filename)
            there = [more for more in _TWO_FILES if self.overlay.resolve(name + more).exists]
            with self.overlay.turns.taken():
                place = self.overlay.resolve(name, False)
                if place.folder is not None and not place.through:
                    self.native.changes.check_entries(place)
                    self.native.changes.ensure(place.folder)
            for more in there:
                self.native.to_write(name + more, keep=True)
            return original(self.native.changes.above(place), flag, *args)

        ndbm.__dict__["open"] = opened

    def _must_exist(self, filename: Path, flag: str, error: type[OSError]) -> None:
        """With the flag "w" nothing is made; the guard's placeholder must not turn this into success."""
        if flag.startswith("w") and not self.overlay.resolve(text(filename)).exists:
            raise error(2, os.strerror(2), filename)
