"""`sqlite3` and `dbm`, which open files in C: what the script opens is a copy in the scratch folder."""

from __future__ import annotations

import functools
import os
import urllib.parse
from types import ModuleType
from typing import Any

from autoddp.isolation import real
from autoddp.isolation.guard.native import Native
from autoddp.isolation.guard.paths import Path, text
from autoddp.isolation.hooks import replace_everywhere, when_imported

_ATTACH, _OK = 24, 0  # of SQLite's authorizer
_SIBLINGS = ("-wal", "-journal")
_ENDINGS = (".db", ".dir", ".pag")  # of the files of dbm.ndbm


class Databases:
    """Patches the modules when the script imports them."""

    def __init__(self, native: Native) -> None:
        self.native = native
        self.view = native.view

    def start(self) -> None:
        """Wait for the modules."""
        when_imported("sqlite3", self._patch_sqlite)
        when_imported("dbm.gnu", self._patch_gnu)
        when_imported("dbm.ndbm", self._patch_ndbm)

    def _patch_sqlite(self, sqlite: ModuleType) -> None:
        """`sqlite3.connect` and `sqlite3.Connection`; `dbm.sqlite3` uses the former."""
        original, databases, stop = sqlite.Connection, self, self.view.stop

        class Connection(original):  # type: ignore[misc, valid-type]
            def __init__(self, database: Path, *args: Any, **kwargs: Any) -> None:
                uri = kwargs.get("uri", args[6] if len(args) > 6 else False)
                super().__init__(databases.path_to_open(database, bool(uri)), *args, **kwargs)
                super().set_authorizer(databases.authorize)

            def set_authorizer(self, *args: Any, **kwargs: Any) -> Any:
                stop("sqlite3.Connection.set_authorizer, in whose place the guard watches ATTACH")

            def enable_load_extension(self, *args: Any, **kwargs: Any) -> Any:
                stop("sqlite3.Connection.enable_load_extension")

        Connection.__module__, Connection.__qualname__ = "sqlite3", "Connection"

        def with_our_class(connect: Any) -> Any:
            @functools.wraps(connect)
            def connected(database: Path, *args: Any, **kwargs: Any) -> Any:
                factory = kwargs.get("factory", args[4] if len(args) > 4 else None)
                if factory is None or factory is original:
                    if len(args) > 4:
                        args = (*args[:4], Connection, *args[5:])
                    else:
                        kwargs["factory"] = Connection
                elif not issubclass(factory, Connection):
                    stop(f"sqlite3.connect to {database!r} with a class made before the guard was there")
                return connect(database, *args, **kwargs)

            return connected

        replace_everywhere(sqlite.connect, with_our_class)
        replace_everywhere(original, lambda _: Connection)

    def authorize(self, action: int, first: str | None, *rest: Any) -> int:
        """SQLite asks while it compiles a statement; ATTACH and VACUUM INTO open another file."""
        if action == _ATTACH and first not in ("", ":memory:"):
            self.view.stop(f"sqlite3 attaches {first or 'a file'}, which the guard does not redirect")
        return _OK

    def path_to_open(self, given: Path, uri: bool) -> Path:
        """The path or URI to open in place of the given one."""
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
        """The real file, if SQLite makes no other file beside it when it reads."""
        place = self.view.resolve(path)
        if not place.is_file or not place.is_real:
            return None
        with real.opened(place.physical, os.O_RDONLY) as descriptor:
            keeps_a_log = real.read(descriptor, 20)[18:] == b"\2\2"
        beside = any(real.status_or_none(place.physical + more) for more in _SIBLINGS)
        return None if keeps_a_log or beside else place.physical

    def _copied(self, path: str) -> str:
        for more in _SIBLINGS:
            if self.view.resolve(path).exists and self.view.resolve(path + more).exists:
                self.native.to_write(path + more, keep=True)
        return str(self.native.to_write(path, keep=True))

    def _patch_gnu(self, gnu: ModuleType) -> None:
        """`dbm.gnu.open`: one file."""
        original = gnu.open

        @functools.wraps(original)
        def opened(filename: Path, flag: str = "r", *args: Any) -> Any:
            if flag.startswith("r"):
                return original(self.native.to_read(filename), flag, *args)
            if flag.startswith("w") and not self.view.resolve(filename).exists:
                raise gnu.error(2, os.strerror(2), filename)  # `to_write` would make the file, and opening succeed
            return original(self.native.to_write(filename, keep="n" not in flag), flag, *args)

        gnu.__dict__["open"] = opened

    def _patch_ndbm(self, ndbm: ModuleType) -> None:
        """`dbm.ndbm.open`: the library adds an ending to the name, or two; which ones depends on how it was built."""
        original = ndbm.open

        @functools.wraps(original)
        def opened(filename: Path, flag: str = "r", *args: Any) -> Any:
            name = text(filename)
            there = [more for more in _ENDINGS if self.view.resolve(name + more).exists]
            with self.view.lock.held():
                place = self.view.resolve(name, False)
                if place.folder is not None and not place.direct:
                    self.view.check_entries(place)
                    self.view.ensure(place.folder)
            for more in there:
                self.native.to_write(name + more, keep=True)
            return original(self.view.above(place), flag, *args)

        ndbm.__dict__["open"] = opened
