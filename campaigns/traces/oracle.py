"""A second opinion on what a run changes, which knows nothing of autoddp: the system calls, as strace saw them.

    finished = watch(["autoddp", ...], allowed=[run_folder], cwd=...)
    for finding in finished.findings: print(finding)

It lists every call that succeeded and changed, or opened for writing, a path outside the allowed places. strace prints
paths as the process named them. In another mount namespace such a name may stand for a file of an overlay; so calls of
processes that live in another one than the first process do not count (they, or an ancestor, called unshare, clone or
setns to get there); everybody else's do. Two things only the snapshot sees: what they do through handles that they
opened before, and a change through a symbolic link that is gone when the run has ended (links are followed only then).
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

# Calls that change the path in the argument of that number; `at`: that one is relative to the folder before it.
# A call that follows a last symbolic link is marked so: what it changes is the link's target.
_BY_PATH = {
    "creat": [(0, "follow")],
    "truncate": [(0, "follow")],
    "rename": [(0, ""), (1, "")],
    "renameat": [(1, "at"), (3, "at")],
    "renameat2": [(1, "at"), (3, "at")],
    "unlink": [(0, "")],
    "unlinkat": [(1, "at")],
    "rmdir": [(0, "")],
    "mkdir": [(0, "")],
    "mkdirat": [(1, "at")],
    "mknod": [(0, "")],
    "mknodat": [(1, "at")],
    "link": [(1, "")],
    "linkat": [(3, "at")],
    "symlink": [(1, "")],
    "symlinkat": [(2, "at")],
    "chmod": [(0, "follow")],
    "fchmodat": [(1, "at follow")],
    "fchmodat2": [(1, "at follow")],
    "chown": [(0, "follow")],
    "lchown": [(0, "")],
    "fchownat": [(1, "at follow")],
    "utime": [(0, "follow")],
    "utimes": [(0, "follow")],
    "futimesat": [(1, "at follow")],
    "utimensat": [(1, "at follow")],
    "setxattr": [(0, "follow")],
    "lsetxattr": [(0, "")],
    "removexattr": [(0, "follow")],
    "lremovexattr": [(0, "")],
    "mount": [(1, "follow")],
    "move_mount": [(3, "at")],
    "umount2": [(0, "follow")],
    "swapon": [(0, "follow")],
}
_BY_HANDLE = ("ftruncate", "fchmod", "fchown", "fsetxattr", "fremovexattr", "fallocate")
_OPENS = {"open": (0, 1, ""), "openat": (1, 2, "at"), "openat2": (1, 2, "at")}  # path, flags
_WRITES = re.compile(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC")
_STEPS = ("chdir", "fchdir", "clone", "clone3", "fork", "vfork", "unshare", "setns", "chroot", "pivot_root")
CALLS = (*_OPENS, *_BY_PATH, *_BY_HANDLE, *_STEPS, "bind")

# Devices without a memory, and what a process says of itself.
HARMLESS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/dev/ptmx", "/dev/pts", "/proc", "/sys/fs/cgroup")

_LINE = re.compile(r"^(?P<pid>\d+)\s+(?P<rest>.*)$")
_RESUMED = re.compile(r"^<\.\.\. (?P<name>\w+) resumed>(?P<rest>.*)$")
_CALL = re.compile(r"^(?P<name>\w+)\((?P<args>.*)\)\s+= (?P<result>.*)$", re.DOTALL)
_HANDLE = re.compile(r"^(?P<number>-?\d+|AT_FDCWD)(?:<(?P<path>.*)>(?P<deleted>\(deleted\))?)?$", re.DOTALL)
_SOCKET = re.compile(r'sun_path="((?:[^"\\]|\\.)*)"')  # sun_path=@"..." has no name in the tree
_CHILD = re.compile(r"^(?P<own>\d+)(?: /\* (?P<outside>\d+) in strace's PID NS \*/)?")
_ESCAPE = re.compile(rb"\\([0-7]{1,3}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"v": b"\v", b"f": b"\f", b"a": b"\a", b"b": b"\b"}


@dataclass(frozen=True)
class Call:
    """One system call that has ended."""

    pid: int
    name: str
    args: Sequence[str]
    result: str
    begins: int  # number of the line
    ends: int


@dataclass(frozen=True)
class Finding:
    """A successful call that changed something outside of the allowed places."""

    pid: int
    call: str
    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.call} {self.path} (process {self.pid}, line {self.line})"


@dataclass(frozen=True)
class Watched:
    """A run under strace that has ended. `elsewhere`: how many processes lived in another mount namespace."""

    returncode: int
    output: str
    findings: Sequence[Finding]
    processes: int
    elsewhere: int


class _Folder:
    """A current folder; threads share one."""

    def __init__(self, path: str) -> None:
        self.path = path


@dataclass
class _Process:
    folder: _Folder
    is_elsewhere: bool


def watch(
    command: Sequence[str],
    allowed: Iterable[Path | str],
    cwd: Path | str,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    patience: float = 600,
) -> Watched:
    """Run a command under strace to its end. `prefix` stands before strace, such as a change of user."""
    with tempfile.TemporaryDirectory(prefix="oracle-", dir="/var/tmp") as folder:  # a room has a /tmp of its own
        if prefix:
            os.chmod(folder, 0o777)
        path = os.path.join(folder, "calls")
        words = ["strace", "-f", "-y", "-qq", "--seccomp-bpf", "--pidns-translation", "-e", "signal=none"]
        words += ["-e", "trace=" + ",".join(f"?{name}" for name in CALLS), "-o", path, "--"]
        finished = subprocess.run(
            [*prefix, *words, *command],
            cwd=cwd,
            env=dict(env) if env is not None else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=patience,
        )
        with open(path, encoding="latin-1", newline="\n") as file:
            lines = file.read().split("\n")
    findings, processes, elsewhere = judge(lines, [*allowed, *HARMLESS], str(cwd))
    return Watched(finished.returncode, finished.stdout, findings, processes, elsewhere)


def judge(lines: Iterable[str], allowed: Iterable[Path | str], cwd: str) -> tuple[list[Finding], int, int]:
    """The findings in strace's output, the number of processes and that of those elsewhere."""
    calls = list(_calls(lines))
    places = [os.path.realpath(path) for path in allowed] + [os.path.abspath(path) for path in allowed]
    processes: dict[int, _Process] = {}
    first = calls[0].pid if calls else 0
    findings: list[Finding] = []
    # A child is born when its parent's call begins: its own first lines may come before that call has ended.
    births = [(call.begins, 0, call) for call in calls if _is_birth(call)]
    others = [(call.ends, 1, call) for call in calls if not _is_birth(call)]
    for _, _, call in sorted(births + others, key=lambda item: item[:2]):
        process = processes.get(call.pid)
        if process is None:
            # The first one; or a child of which the parent's line is lost: nothing speaks for its being elsewhere.
            start = processes[first].folder.path if first in processes else os.path.abspath(cwd)
            process = processes[call.pid] = _Process(_Folder(start), False)
        if call.result.startswith(("-1", "?")):
            continue
        _correct(process, call)
        if call.name in _STEPS:
            _step(processes, process, call)
        elif not process.is_elsewhere:
            for path in _changed(call, process.folder.path):
                if not _is_in(path, places):
                    findings.append(Finding(call.pid, call.name, path, call.ends + 1))
    return findings, len(processes), sum(process.is_elsewhere for process in processes.values())


def _calls(lines: Iterable[str]) -> Iterator[Call]:
    """Whole calls; strace cuts a call in two when another process's comes in between."""
    begun: dict[int, tuple[str, int]] = {}
    for number, line in enumerate(lines):
        match = _LINE.match(line)
        if not match:
            continue
        pid, rest, begins = int(match["pid"]), match["rest"], number
        if rest.endswith("<unfinished ...>"):
            begun[pid] = (rest[: -len("<unfinished ...>")].rstrip(), number)
            continue
        if resumed := _RESUMED.match(rest):
            if pid not in begun:
                continue
            start, begins = begun.pop(pid)
            rest = start + resumed["rest"]
        if call := _CALL.match(rest):
            yield Call(pid, call["name"], tuple(_split(call["args"])), call["result"].strip(), begins, number)


def _split(args: str) -> Iterator[str]:
    """Arguments, at the commas that are in no string, path or bracket."""
    depth, start, quoted, i = 0, 0, False, 0
    while i < len(args):
        letter = args[i]
        if quoted:
            if letter == "\\":
                i += 1
            elif letter == '"':
                quoted = False
        elif letter == '"':
            quoted = True
        elif letter == "<" and i and (args[i - 1].isalnum()):  # a handle's path: it ends at the next >
            i = max(i, args.find(">", i))
        elif letter in "{[(":
            depth += 1
        elif letter in "}])":
            depth -= 1
        elif letter == "," and depth == 0:
            yield args[start:i].strip()
            start = i + 1
        i += 1
    if args[start:].strip():
        yield args[start:].strip()


def _is_birth(call: Call) -> bool:
    return call.name in ("clone", "clone3", "fork", "vfork") and bool(_CHILD.match(call.result))


def _correct(process: _Process, call: Call) -> None:
    """strace -y says the current folder beside AT_FDCWD: better than what was followed."""
    for arg in call.args:
        if arg.startswith("AT_FDCWD<") and (match := _HANDLE.match(arg)) and not match["deleted"]:
            process.folder.path = _text(match["path"])


def _step(processes: dict[int, _Process], process: _Process, call: Call) -> None:
    """What changes where a process is."""
    words = " ".join(call.args)
    if _is_birth(call):
        match = _CHILD.match(call.result)
        assert match
        child = int(match["outside"] or match["own"])
        folder = process.folder if "CLONE_FS" in words else _Folder(process.folder.path)
        processes[child] = _Process(folder, process.is_elsewhere or "CLONE_NEWNS" in words)
    elif call.name == "unshare":
        if "CLONE_NEWNS" in words or "CLONE_FS" in words:
            process.folder = _Folder(process.folder.path)
        process.is_elsewhere = process.is_elsewhere or "CLONE_NEWNS" in words
    elif call.name == "setns":
        kind = call.args[1] if len(call.args) > 1 else "0"
        process.is_elsewhere = process.is_elsewhere or kind == "0" or "CLONE_NEWNS" in kind
    elif call.name == "chdir":
        process.folder.path = _resolve(process.folder.path, _string(call.args[0]), follow=True)
    elif call.name == "fchdir" and (match := _HANDLE.match(call.args[0])) and match["path"]:
        process.folder.path = _text(match["path"])


def _changed(call: Call, cwd: str) -> Iterator[str]:
    """The paths that a successful call changes or opens for writing."""
    if call.name in _OPENS:
        path, flags, kind = _OPENS[call.name]
        if len(call.args) > flags and _WRITES.search(call.args[flags]) and "O_TMPFILE" not in call.args[flags]:
            opened = _HANDLE.match(call.result)  # with the real path of what was opened
            if opened and opened["path"] and opened["path"].startswith("/"):
                yield _text(opened["path"])
            else:
                yield from _named(call, [(path, f"{kind} follow")], cwd)
    elif call.name in _BY_PATH:
        yield from _named(call, _BY_PATH[call.name], cwd)
    elif call.name in _BY_HANDLE:
        match = _HANDLE.match(call.args[0])
        path = (match and match["path"]) or ""
        if match and path.startswith("/") and not path.startswith("/memfd:") and not match["deleted"]:
            yield _text(path)
    elif call.name == "bind" and (match := _SOCKET.search(" ".join(call.args))):
        yield _resolve(cwd, _text(match[1]), follow=False)


def _named(call: Call, where: Iterable[tuple[int, str]], cwd: str) -> Iterator[str]:
    for position, kind in where:
        if position >= len(call.args):
            continue
        base, path = cwd, call.args[position]
        if "at" in kind.split():
            match = _HANDLE.match(call.args[position - 1])
            if match and match["path"]:
                base = _text(match["path"])
        follows = "follow" in kind and not any("NOFOLLOW" in arg for arg in call.args)
        if path in ("NULL", '""'):  # utimensat(handle, NULL), fchownat(handle, "", AT_EMPTY_PATH): the handle itself
            yield base
        elif path.startswith('"'):
            yield _resolve(base, _string(path), follow=follows)


def _resolve(base: str, path: str, follow: bool) -> str:
    """The path without links on the way, as far as they still stand as they did."""
    full = os.path.join(base, path)
    if follow:
        return os.path.realpath(full)
    folder, name = os.path.split(full.rstrip("/") or "/")
    if name in ("..", "."):
        return os.path.realpath(full)
    return os.path.join(os.path.realpath(folder), name)


def _is_in(path: str, places: Sequence[str]) -> bool:
    return any(path == place or path.startswith(place.rstrip("/") + "/") for place in places)


def _string(arg: str) -> str:
    """What stands between an argument's quotes."""
    return _text(arg[1 : arg.rindex('"')]) if arg.startswith('"') and arg.count('"') > 1 else arg


def _text(escaped: str) -> str:
    """strace's escapes undone."""

    def one(match: re.Match[bytes]) -> bytes:
        code = match[1]
        if code[:1].isdigit():
            return bytes([int(code, 8) & 255])
        if code[:1] == b"x" and len(code) == 3:
            return bytes([int(code[1:], 16)])
        return _ESCAPED.get(code, code)

    return os.fsdecode(_ESCAPE.sub(one, escaped.encode("latin-1")))


def unique(findings: Iterable[Finding]) -> list[Finding]:
    """One of each call and path: a log that was opened a thousand times is one finding."""
    seen: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        seen.setdefault((finding.call, finding.path), replace(finding))
    return list(seen.values())
