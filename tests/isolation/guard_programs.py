"""Small file-system programs, seeded, whose whole outcome can be compared: once plainly, once under the guard.

    python guard_programs.py plain|guard ROOT SCRATCH FIRST LAST    # programs of these seeds, outcomes as JSON lines

Two processes take turns in each program, so that one sees what the other has done.
"""

from __future__ import annotations

import glob
import json
import os
import random
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoddp.isolation.kernel.landlock import restrict_writes, supported

OLD = 1_600_000_000 * 10**9  # the time of everything in a new tree, in ns
STEPS = 40
NAMES = ["a", "b", "c", "d", "e"]


def plant(root: str, seed: int) -> None:
    """The tree that a program starts with: the user's files."""
    rng = random.Random(seed)
    os.mkdir(root)
    for folder in ("d", "d/e", "b"):
        if rng.random() < 0.8 and os.path.isdir(os.path.dirname(f"{root}/{folder}")):
            os.mkdir(f"{root}/{folder}")
    for _ in range(8):
        at = f"{root}/{rng.choice(['', 'd/', 'd/e/', 'b/'])}{rng.choice(NAMES)}"
        if os.path.lexists(at) or not os.path.isdir(os.path.dirname(at)):
            continue
        kind = rng.random()
        if kind < 0.6:
            Path(at).write_text(f"real {os.path.basename(at)}")
            os.chmod(at, rng.choice([0o644, 0o600, 0o755]))
        elif kind < 0.75:
            os.mkdir(at, 0o750)
        else:
            os.symlink(rng.choice(["a", "b", "d", "d/e", "../a", "gone", f"{root}/d", "e/../a"]), at)
    for folder, folders, files in os.walk(root, topdown=False):
        for name in (*folders, *files):
            os.utime(f"{folder}/{name}", ns=(OLD, OLD), follow_symlinks=False)
    os.utime(root, ns=(OLD, OLD))


def path(rng: random.Random, root: str) -> Any:
    """Some path: of the tree or not, with what paths may contain."""
    parts = [rng.choice(NAMES) for _ in range(rng.choice([1, 1, 1, 2, 2, 3]))]
    if rng.random() < 0.1:
        parts.insert(rng.randrange(len(parts) + 1), rng.choice(["..", ".", "", ".."]))
    text = "/".join(parts)
    if text.startswith("/") or rng.random() < 0.3:
        text = f"{root}/{text}"
    if rng.random() < 0.06:
        text += "/"
    kind = rng.random()
    return os.fsencode(text) if kind < 0.1 else Path(text) if kind < 0.2 else text


def _status(status: os.stat_result) -> list[Any]:
    kind = stat.S_IFMT(status.st_mode)
    more = [status.st_size, status.st_nlink] if kind == stat.S_IFREG else []
    return [oct(status.st_mode), status.st_mtime_ns == OLD, *more]


def _opened(at: Any, flags: int, **more: Any) -> Any:
    descriptor = os.open(at, flags, 0o640, **more)
    try:
        found: list[Any] = [_status(os.fstat(descriptor))]
        if flags & (os.O_WRONLY | os.O_RDWR):
            found.append(os.write(descriptor, b"+"))
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode) and not flags & os.O_WRONLY:
            found.append(os.pread(descriptor, 100, 0).decode())
        return found
    finally:
        os.close(descriptor)


def _filed(at: Any, mode: str, text: str = "") -> Any:
    with open(at, mode) as file:
        if text:
            file.write(text)
        name = os.fsdecode(file.name)
        return [name, file.read()] if "r" in mode or "+" in mode else [name]


def _scanned(at: Any) -> Any:
    found = []
    with os.scandir(at) as entries:
        for entry in entries:
            kinds = [entry.is_dir(), entry.is_file(), entry.is_symlink(), entry.is_dir(follow_symlinks=False)]
            found.append([os.fsdecode(entry), *kinds, _status(entry.stat(follow_symlinks=False))])
    return sorted(found)


def _with_folder(at: Any, use: Callable[[int], Any]) -> Any:
    descriptor = os.open(at, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return use(descriptor)
    finally:
        os.close(descriptor)


def _dated(at: Any) -> Any:
    os.utime(at, ns=(OLD, OLD))
    return _status(os.stat(at))


def _moded(at: Any, mode: int) -> Any:
    os.chmod(at, mode)
    return _status(os.stat(at))


def _sorted(found: Any) -> list[str]:
    return sorted(os.fsdecode(each) for each in found)


def _walked(at: Any) -> Any:
    return sorted([os.fsdecode(f), _sorted(d), _sorted(n)] for f, d, n in os.walk(at))


FLAGS = ["O_CREAT", "O_EXCL", "O_TRUNC", "O_APPEND", "O_NOFOLLOW", "O_DIRECTORY"]


def action(rng: random.Random, root: str) -> tuple[str, Callable[[], Any]]:
    """The next thing that a program does; all chance is spent here, the same in both runs."""
    a, b, name = path(rng, root), path(rng, root), rng.choice(NAMES)
    flags = rng.choice([os.O_RDONLY, os.O_WRONLY, os.O_RDWR])
    for flag in FLAGS:
        if rng.random() < 0.25:
            flags |= getattr(os, flag)
    if flags & os.O_DIRECTORY and flags & os.O_CREAT:
        flags &= ~os.O_DIRECTORY  # kernels differ
    target = rng.choice(["a", "b", "d/e", "../b", "gone", f"{root}/d"])
    mode = rng.choice([0o700, 0o644, 0o755])
    text = rng.choice(["one", "second", "3"])
    choices: dict[str, tuple[int, Callable[[], Any]]] = {
        "write": (5, lambda: _filed(a, "w", text)),
        "append": (3, lambda: _filed(a, "a+", text)),
        "exclusive": (1, lambda: _filed(a, "x", text)),
        "update": (3, lambda: _filed(a, "r+", text)),
        "read": (4, lambda: _filed(a, "r")),
        "os.open": (5, lambda: _opened(a, flags)),
        "rename": (6, lambda: os.rename(a, b)),
        "replace": (4, lambda: os.replace(a, b)),
        "renames": (1, lambda: os.renames(a, b)),
        "unlink": (5, lambda: os.unlink(a)),
        "remove": (2, lambda: os.remove(a)),
        "mkdir": (4, lambda: os.mkdir(a, mode)),
        "makedirs": (2, lambda: os.makedirs(a, exist_ok=rng_bit)),
        "rmdir": (3, lambda: os.rmdir(a)),
        "removedirs": (1, lambda: os.removedirs(f"{root}/d/e/{name}")),
        "rmtree": (3, lambda: shutil.rmtree(a)),
        "symlink": (3, lambda: os.symlink(target, a)),
        "link": (3, lambda: os.link(a, b)),
        "readlink": (1, lambda: os.fsdecode(os.readlink(a))),
        "listdir": (3, lambda: _sorted(os.listdir(a))),
        "scandir": (3, lambda: _scanned(a)),
        "stat": (3, lambda: _status(os.stat(a))),
        "lstat": (2, lambda: _status(os.lstat(a))),
        "exists": (1, lambda: [os.path.exists(a), os.path.lexists(a), os.path.isdir(a), os.path.islink(a)]),
        "access": (1, lambda: [os.access(a, each) for each in (os.F_OK, os.W_OK, os.X_OK)]),
        "chmod": (2, lambda: _moded(a, mode)),
        "utime": (2, lambda: _dated(a)),
        "truncate": (2, lambda: os.truncate(a, rng_size)),
        "chdir": (3, lambda: os.chdir(a)),
        "home": (2, lambda: os.chdir(root)),
        "getcwd": (2, os.getcwd),
        "realpath": (2, lambda: os.fsdecode(os.path.realpath(a))),
        "strict": (1, lambda: os.fsdecode(os.path.realpath(a, strict=True))),
        "walk": (1, lambda: _walked(a)),
        "glob": (1, lambda: sorted(glob.glob("*") + glob.glob("*/*"))),
        "copy": (3, lambda: str(shutil.copy2(os.fsdecode(a), os.fsdecode(b)))),
        "copytree": (1, lambda: str(shutil.copytree(os.fsdecode(a), os.fsdecode(b), symlinks=True))),
        "move": (3, lambda: str(shutil.move(os.fsdecode(a), os.fsdecode(b)))),
        "touch": (2, lambda: Path(os.fsdecode(a)).touch()),
        "Path.unlink": (1, lambda: Path(os.fsdecode(a)).unlink(missing_ok=True)),
        "Path.replace": (2, lambda: str(Path(os.fsdecode(a)).replace(os.fsdecode(b)))),
        "Path.iterdir": (1, lambda: sorted(map(str, Path(os.fsdecode(a)).iterdir()))),
        "rglob": (1, lambda: sorted(map(str, Path(os.fsdecode(a)).rglob("*")))),
        "samefile": (1, lambda: os.path.samefile(a, b)),
        "fd listdir": (2, lambda: _with_folder(a, lambda fd: _sorted(os.listdir(fd)))),
        "fd scandir": (1, lambda: _with_folder(a, _scanned)),
        "fd mkdir": (1, lambda: _with_folder(a, lambda fd: os.mkdir(name, dir_fd=fd))),
        "fd unlink": (1, lambda: _with_folder(a, lambda fd: os.unlink(name, dir_fd=fd))),
        "fd rename": (1, lambda: _with_folder(a, lambda fd: os.rename(name, b, src_dir_fd=fd))),
        "fd open": (2, lambda: _with_folder(a, lambda fd: _opened(name, flags, dir_fd=fd))),
        "fchdir": (1, lambda: _with_folder(a, os.fchdir)),
        "fchmod": (1, lambda: _with_folder(a, lambda fd: os.fchmod(fd, 0o711))),
    }
    rng_bit, rng_size = rng.random() < 0.5, rng.randrange(8)
    what = rng.choices(list(choices), [weight for weight, _ in choices.values()])[0]
    run = choices[what][1]
    return f"{what} {a!r} {b!r} {name} {flags:o}", lambda: run() if inside(root, a, b) else "outside"


def inside(root: str, *paths: Any) -> bool:
    """Whether a step stays in its tree: the plain run must not reach anything else on this machine."""
    try:
        if os.path.commonpath([os.path.realpath(os.getcwd()), root]) != root:
            return False
    except FileNotFoundError:  # a working directory that is gone: only from a full path is there anything to reach
        return all(os.fsdecode(each).startswith("/") and ".." not in os.fsdecode(each) for each in paths)
    for each in paths:
        real = os.path.realpath(os.fsdecode(each))
        if not (real == root or real.startswith(root + "/")) or ".." in os.fsdecode(each).split("/")[:1]:
            return False
        if os.path.realpath(os.path.dirname(os.fsdecode(each).rstrip("/")) or ".") + "/" < root:
            return False
    return True


def outcome(run: Callable[[], Any]) -> Any:
    """What a call returned or raised."""
    try:
        return run()
    except shutil.Error as error:
        return ["shutil.Error", str(error)]
    except OSError as error:
        names = [f"{type(each).__name__} {each}" for each in (error.filename, error.filename2)]
        return [type(error).__name__, error.errno, *names]


def dump(folder: str) -> Any:
    """Everything that one can see below a folder."""
    found = []
    for name in sorted(os.listdir(folder)):
        at = f"{folder}/{name}"
        status = os.lstat(at)
        entry: list[Any] = [at, _status(status)]
        if stat.S_ISLNK(status.st_mode):
            entry.append(os.readlink(at))
        elif stat.S_ISREG(status.st_mode):
            entry.append(Path(at).read_text())
        else:
            entry += [dump(at)]
        found.append(entry)
    return found


CHILDS = {"write", "append", "exclusive", "update", "read", "os.open", "unlink", "remove", "mkdir", "makedirs", "link"}
CHILDS |= {"symlink", "listdir", "scandir", "stat", "chmod", "utime", "truncate", "walk", "glob", "copy", "touch"}


def program(root: str, seed: int) -> list[Any]:
    """Run one, in this process and in a fork of it by turns."""
    os.chdir(root)
    (from_parent, to_child), (from_child, to_parent) = os.pipe(), os.pipe()
    child = os.fork()
    for end in (from_child, to_child) if child == 0 else (from_parent, to_parent):
        os.close(end)  # else the end of one process would not end the other's wait
    rng = random.Random(seed)
    found: list[Any] = []
    try:
        for step in range(STEPS):
            what, run = action(rng, root)
            # Moves and removals are the parent's, who alone has another working directory: the guard cannot tell that
            # a process stands in a folder that another one has replaced.
            childs_turn = rng.random() < 0.3 and what.split()[0] in CHILDS
            if child == 0 and childs_turn:
                if not os.read(from_parent, 1):
                    break
                line = json.dumps(outcome(run)).encode()
                os.write(to_parent, len(line).to_bytes(4, "little") + line)
            elif child and childs_turn:
                os.write(to_child, b".")
                length, line = int.from_bytes(os.read(from_child, 4), "little"), b""
                while len(line) < length:
                    line += os.read(from_child, length - len(line))
                assert line, "the child has died"
                found.append([step, "child", what, json.loads(line)])
            elif child:
                found.append([step, "parent", what, outcome(run)])
    finally:
        if child == 0:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(to_child)
    os.close(from_child)
    os.chdir("/")
    found.append(["end", outcome(lambda: dump(root))])
    return found


def main() -> None:
    mode, trees, scratch, first, last = sys.argv[1:]
    if mode == "guard":
        from guarded import guard

        guard(scratch)
    elif supported():
        restrict_writes([trees])  # a second wall around the programs
    for seed in range(int(first), int(last)):
        root = f"{trees}/{seed}"
        print(json.dumps([seed, program(root, seed)]).replace(trees, "TREES"))


if __name__ == "__main__":
    main()
