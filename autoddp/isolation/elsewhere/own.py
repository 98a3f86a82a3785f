"""Which processes belong to the attempt, and which servers of this machine are run by them."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

from autoddp.isolation.children import VARIABLE

_LISTENS = "0A"  # a socket's state in /proc/net/tcp
_ACCEPTS = 0x10000  # a flag of a socket with a listener, in /proc/net/unix
_roots = (os.getppid() if os.getppid() > 1 else os.getpid(),)
"""What has started this process, also in a fork of it. 1 has adopted it, or it is the first one of a container."""
_launcher = ""
"""The launcher's socket, where this is the keeper."""
_ANY = ("0.0.0.0", "::")
"""Addresses at which a client reaches its own machine."""
_known: set[str] = set()
"""Sockets that were found to be the attempt's, by the numbers that the kernel gives them."""


def count_below(pid: int, launcher: str = "") -> None:
    """Count as the attempt's what this process has started: for the keeper, which is none of the attempt itself.

    `launcher`: the path of the launcher's socket, to which ranks connect. The launcher is none of the attempt either.
    """
    global _roots, _launcher
    _roots, _launcher = (pid,), launcher


def serves_port(port: int) -> bool:
    """Whether all that listens on this TCP port belongs to the attempt, or nothing listens there."""
    return _are_own(line[9] for name in ("tcp", "tcp6") for line in _table(name) if _is_at(line, port))


def serves_path(path: str) -> bool:
    """Whether all that listens on this Unix socket belongs to the tuning run, or nothing listens there."""
    return path == _launcher or _are_own_at(path, _ACCEPTS)


def runs_peer(place: int | str, mine: int = 0) -> bool:
    """Whether a connection of this process ends in the attempt.

    `place` is the other end's TCP port on this machine, with `mine` as this end's, or the path of a Unix socket.
    """
    if isinstance(place, str):
        return serves_path(place)
    lines = [line for name in ("tcp", "tcp6") for line in _table(name) if len(line) > 9 and _port(line[1]) == place]
    accepted = {line[9] for line in lines if _port(line[2]) == mine} - {"0"}
    listens = {line[9] for line in lines if line[3] == _LISTENS}
    return bool(accepted or listens) and _are_own(iter(accepted or listens))


def receives(place: int | str) -> bool:
    """Whether all that receives datagrams on a port of this machine, or at a path, belongs to the attempt, or nothing.

    A path of Linux that begins with a zero byte is a name in no folder.
    """
    if isinstance(place, int):
        return _are_own(line[9] for name in ("udp", "udp6") for line in _table(name) if _port(line[1]) == place)
    return _are_own_at(place)


def is_here(family: int, host: str) -> bool:
    """Whether a socket of this family would reach this machine at `host`, an address."""
    if host in _ANY:
        return True
    with socket.socket(family, socket.SOCK_DGRAM) as asks, contextlib.suppress(OSError):
        asks.connect((host, 9))  # sends nothing; to reach an address of its own, the kernel takes the same one
        return bool(asks.getsockname()[0] == host)
    return False


def parent_of(pid: int) -> int:
    """The parent of a process; -1 if that process has ended, 0 if it is hidden.

    Where /proc is mounted with hidepid, those of other users are. The user's own begin below such a one, as sshd.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return -1 if _session(pid) == -1 else 0


def has_ended(pid: int) -> bool:
    """Whether a process has ended, also where its parent has not collected it yet."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] == b"Z"
    except (OSError, IndexError):  # it may be hidden
        return _session(pid) == -1


def is_below(pid: int, *roots: int) -> bool:
    """Whether a process is one of `roots` or was started by one; also True if it has ended."""
    while pid > 1 and pid not in roots:
        pid = parent_of(pid)
    return pid in (*roots, -1)


def pid_namespace() -> str:
    """The namespace in which this process has its id, such as "pid:[4026531836]"; "" where the kernel tells none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_own_process(pid: int) -> bool:
    """Whether a process, or a thread, belongs to the attempt: this one, its parent, and what either has started.

    Also True if it has ended.
    """
    if not os.path.isdir("/proc/self"):  # not Linux: all processes of the same session pass
        return pid in _roots or _session(pid) in (-1, os.getsid(0))
    return is_below(pid, os.getpid(), *_roots)


def process_of(descriptor: int, holder: int | str = "self") -> int:
    """The process that a pidfd, or a descriptor of a process's folder in /proc, stands for; -1 if it stands for none.

    Also -1 if that process has ended. `holder` is the process that has it open.
    """
    with open(f"/proc/{holder}/fdinfo/{descriptor}", encoding="ascii") as file:
        for line in file:
            if line.startswith("Pid:"):
                return int(line.split()[1])
    name = os.path.basename(os.readlink(f"/proc/{holder}/fd/{descriptor}"))
    return int(name) if name.isdecimal() else -1


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _is_at(line: list[str], port: int) -> bool:
    return len(line) > 9 and line[3] == _LISTENS and _port(line[1]) == port


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _table(name: str) -> Iterator[list[str]]:
    """The lines of a table of sockets, without its heading; none where the kernel has no such table."""
    place = f"/proc/net/{name}"
    with (
        contextlib.suppress(FileNotFoundError),
        open(place, encoding="utf-8", errors="surrogateescape", newline="\n") as file,
    ):
        next(file)
        # The last column of Unix sockets is a path, in which there may be blanks.
        yield from (line.removesuffix("\n").split(maxsplit=7 if name == "unix" else -1) for line in file)


def _are_own_at(path: str, flags: int = 0) -> bool:
    """Whether all Unix sockets at a path, with these flags, belong to the attempt, or there is none.

    The table has the name by which each socket was made: it may be relative, lead over links, or hold a line feed.
    """
    abstract, real = path.startswith("\0"), os.path.realpath(path.replace("\0", ""))
    name = path.replace("\0", "@", 1)

    def is_it(bound: str) -> bool:
        if abstract or bound == name:
            return bound == name
        near = os.path.basename(bound) == os.path.basename(real)  # no other path is looked at: that may take for ever
        return near and os.path.realpath(bound) == real

    lines = [line for line in _table("unix") if len(line) > 7 and is_it(line[7]) and int(line[3], 16) & flags == flags]
    if not lines and not abstract and _is_socket(real):
        return False
    return _are_own(line[6] for line in lines)


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _are_own(sockets: Iterator[str]) -> bool:
    if not os.path.exists("/proc/net/tcp"):
        return False  # not Linux, where nothing tells whose a server is
    wanted = set(sockets)
    if wanted - _known:
        _known.update(wanted & set(_sockets()))
    return wanted <= _known


def _sockets() -> Iterator[str]:
    """Sockets of all processes of the attempt."""
    plan, roots = os.environ.get(VARIABLE), (os.getpid(), *_roots)
    mark = b"\0" + os.fsencode(f"{VARIABLE}={plan}") + b"\0" if plan else None
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # another user's, or it ends at this moment
            held = list(_held(pid))
            if held and (is_below(int(pid), *roots) or _has(pid, mark)):
                yield from held


def _held(pid: str) -> Iterator[str]:
    """Sockets of one process."""
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed at this moment
            target = os.readlink(f"/proc/{pid}/fd/{number}")
            if target.startswith("socket:["):
                yield target[len("socket:[") : -1]


def _has(pid: str, mark: bytes | None) -> bool:
    """Whether a process was started with the attempt's variable. It may have no other trace, as after a double fork."""
    if mark is None:
        return False
    with open(f"/proc/{pid}/environ", "rb") as file:
        return mark in b"\0" + file.read()
