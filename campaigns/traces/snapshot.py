"""Everything that can be seen of a tree of files, and how two looks at it differ.

`take(folder)` before, `difference(before, take(folder))` after: no line, no change.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "folder",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
}


@dataclass(frozen=True)
class Entry:
    """One name. `device` and `inode` stay: a file that was replaced by its own copy has been touched."""

    kind: str
    mode: str
    uid: int
    gid: int
    size: int
    mtime_ns: int
    nlink: int
    inode: int
    digest: str
    target: str
    xattrs: tuple[tuple[str, bytes], ...]


Snapshot = Mapping[str, Entry]


def take(root: Path | str, exclude: Iterable[Path | str] = (), deep: bool = True) -> dict[str, Entry]:
    """Every path below `root`, and `root` itself as `.`; without those of `exclude` and all below them.

    Not `deep`: only the names directly in `root`, and of `root` itself nothing (others may write there too).
    """
    root = Path(root)
    left_out = {os.path.abspath(path) for path in exclude}
    found = {} if not deep else {".": _entry(str(root))}
    for path in _walk(str(root), left_out, deep):
        found[os.path.relpath(path, root)] = _entry(path)
    return found


def difference(before: Snapshot, after: Snapshot) -> list[str]:
    """One line for each path that differs, by path; empty if nothing does."""
    lines = []
    for path in sorted({*before, *after}):
        if path not in after:
            lines.append(f"{path}: is gone (was a {before[path].kind} of {before[path].size} bytes)")
        elif path not in before:
            lines.append(f"{path}: is new (a {after[path].kind} of {after[path].size} bytes)")
        elif before[path] != after[path]:
            lines.append(f"{path}: {', '.join(_changes(before[path], after[path]))}")
    return lines


def _walk(folder: str, left_out: set[str], deep: bool) -> Iterator[str]:
    with os.scandir(folder) as entries:
        names = sorted((entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries)
    for path, is_folder in names:
        if os.path.abspath(path) in left_out:
            continue
        yield path
        if is_folder and deep:
            yield from _walk(path, left_out, deep)


def _entry(path: str) -> Entry:
    info = os.lstat(path)
    kind = _KINDS[stat.S_IFMT(info.st_mode)]
    if kind == "link":
        target = os.readlink(path)
    elif kind.endswith("device"):
        target = f"{os.major(info.st_rdev)}:{os.minor(info.st_rdev)}"
    else:
        target = ""
    return Entry(
        kind=kind,
        mode=f"{stat.S_IMODE(info.st_mode):04o}",
        uid=info.st_uid,
        gid=info.st_gid,
        size=info.st_size,
        mtime_ns=info.st_mtime_ns,
        nlink=info.st_nlink,
        inode=info.st_ino,
        digest=_digest(path) if kind == "file" else "",
        target=target,
        xattrs=_xattrs(path),
    )


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16] if hasattr(hashlib, "file_digest") else _old(file)


def _old(file) -> str:  # Python 3.10 has no file_digest
    return hashlib.sha256(file.read()).hexdigest()[:16]


def _xattrs(path: str) -> tuple[tuple[str, bytes], ...]:
    if not hasattr(os, "listxattr"):
        return ()
    try:
        names = os.listxattr(path, follow_symlinks=False)
        return tuple((name, os.getxattr(path, name, follow_symlinks=False)) for name in sorted(names))
    except OSError:  # a file system without them
        return ()


def _changes(before: Entry, after: Entry) -> Iterator[str]:
    for field in fields(Entry):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if old != new:
            yield f"{field.name} {old!r} -> {new!r}"
