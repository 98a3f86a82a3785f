"""Databases in files: dbm, shelve, SQLite with a journal and with a write-ahead log."""

import contextlib
import dbm.dumb
import shelve
import sqlite3
from pathlib import Path

from traces.trace import nothing, only, trace

# dbm imports them at its first use, and two threads that prepare folders may then meet a module half made.
for name in ("dbm.gnu", "dbm.ndbm"):
    with contextlib.suppress(ImportError):
        __import__(name)


def _shelf(folder: Path) -> None:
    with shelve.open(str(folder / "shelf")) as shelf:
        shelf["epoch"] = 3


def _shelf_is_users(folder: Path) -> None:
    with shelve.open(str(folder / "shelf"), flag="r") as shelf:
        assert dict(shelf) == {"epoch": 3}, f"the shelf has {dict(shelf)}"


@trace(prepare=_shelf, after=_shelf_is_users)
def shelve_entries(folder, rank, step):
    """shelve: one entry changed, one new."""
    with shelve.open(str(folder / "shelf"), writeback=True) as shelf:
        shelf["epoch"] = 100 + step
        shelf[f"step{step}"] = list(range(100))


def _dumb(folder: Path) -> None:
    with dbm.dumb.open(str(folder / "table"), "c") as table:
        table["epoch"] = "3"


@trace(prepare=_dumb, after=only("table.bak", "table.dat", "table.dir"))
def dbm_in_plain_python(folder, rank, step):
    """dbm.dumb: its index is renamed and written again."""
    with dbm.dumb.open(str(folder / "table"), "w") as table:
        table["epoch"] = str(100 + step)


def _database(journal: str):
    def prepare(folder: Path) -> None:
        connection = sqlite3.connect(folder / "study.db")
        connection.execute(f"pragma journal_mode={journal}")
        with connection:
            connection.execute("create table runs (name text)")
            connection.execute("insert into runs values ('user')")
        connection.close()

    return prepare


def _one_run(folder: Path) -> None:
    connection = sqlite3.connect(f"file:{folder / 'study.db'}?mode=ro", uri=True)
    found = connection.execute("select name from runs").fetchall()
    connection.close()
    assert found == [("user",)], f"the database has {found}"


@trace(prepare=_database("delete"), after=_one_run)
def sqlite_existing(folder, rank, step):
    """sqlite3: a row more in a database that is there."""
    connection = sqlite3.connect(folder / "study.db")
    with connection:
        connection.execute("insert into runs values (?)", (f"job {step}",))
    assert connection.execute("select count(*) from runs").fetchone() == (2 + step,)
    connection.close()


@trace(prepare=_database("wal"))  # no `after`: even reading a database with a log of that kind makes files beside it
def sqlite_write_ahead(folder, rank, step):
    """sqlite3 with a write-ahead log, which has files of its own and maps one of them."""
    connection = sqlite3.connect(folder / "study.db")
    with connection:
        connection.execute("insert into runs values (?)", (f"job {step}",))
    connection.close()


@trace(prepare=nothing, after=only())
def sqlite_new(folder, rank, step):
    """sqlite3: a database that is not there yet, with another one copied from it."""
    connection = sqlite3.connect(folder / "new.db")
    with connection:
        connection.execute("create table if not exists runs (name text)")
        connection.execute("insert into runs values (?)", (f"job {step}",))
    copy = sqlite3.connect(folder / f"copy{step}.db")
    connection.backup(copy)
    copy.close()
    connection.close()


@trace(prepare=_database("delete"), after=_one_run)
def sqlite_by_uri(folder, rank, step):
    """sqlite3 by a URI, with vacuum, which writes the whole file again."""
    connection = sqlite3.connect(f"file:{folder / 'study.db'}?mode=rw", uri=True, isolation_level=None)
    connection.execute("delete from runs")
    connection.execute("vacuum")
    connection.close()
