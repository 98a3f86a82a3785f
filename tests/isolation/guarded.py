"""Starts the guard at the top of a test's script; what would end tuning ends the process with code 77."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from autoddp.isolation import Level, children
from autoddp.isolation.elsewhere import watch_clients
from autoddp.isolation.guard import start_guard
from autoddp.isolation.pipes import Pipes
from autoddp.isolation.plan import IsolationPlan


def stop(reason: str) -> NoReturn:
    """The launcher's part: the reason, and the end of the process."""
    os.write(1, f"STOPPED: {reason}\n".encode())
    os._exit(77)


def guard(scratch: str, landlock: bool = False, writable: tuple[str, ...] = ()) -> None:
    """Under Landlock the kernel is asked as well, as the launcher does before it starts the ranks."""
    if landlock:
        from autoddp.isolation.kernel.landlock import restrict_writes

        os.makedirs(scratch, exist_ok=True)
        restrict_writes([scratch, "/dev", "/proc", *writable])
    plan = IsolationPlan(Level.GUARD, f"{scratch}/socket", scratch=scratch, writable=writable, landlock=landlock)
    os.environ["AUTODDP_WORKER_ISOLATION"] = plan.text()
    _start(plan)


TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parents[1]
SITECUSTOMIZE = "from guarded import guard_as_told\nguard_as_told()\n"


def run(
    code: str,
    tree: Path,
    scratch: Path,
    landlock: bool = False,
    inject: Path | None = None,
    wait: bool = True,
    writable: tuple[str, ...] = (),
) -> Any:
    """A script in the folder `tree`, under the guard. With `inject` its Python children are guarded too.

    Where it is waited for it is a fork of a process that has imported this module: that takes half of a start's time.
    """
    path = [str(TESTS), str(ROOT)]
    if inject is not None:
        inject.mkdir(exist_ok=True)
        (inject / "sitecustomize.py").write_text(SITECUSTOMIZE)
        path.insert(0, str(inject))
    start = f"import os, sys; from guarded import guard; guard({str(scratch)!r}, {landlock}, {writable})\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("AUTODDP_WORKER_ISOLATION", None)
    # A file of its own: an interpreter that starts slowly must not read the next script in the place of its own.
    script = Path(tempfile.mkdtemp(dir=scratch.parent), "script.py")
    script.write_text(start + code)
    if wait and inject is None:
        return _forked(script, tree, environment)
    process = _started(script, tree, environment)
    return finished(process) if wait else process


def _started(script: Path, tree: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    words = [sys.executable, str(script)]
    return subprocess.Popen(
        words, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _forked(script: Path, tree: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Exit code, and all that was printed, of a fork of a process that has imported this module."""
    import forks  # nothing that a script under the guard imports
    from launchers import FROM_NOTHING

    if FROM_NOTHING in os.environ:
        return finished(_started(script, tree, environment))
    with open(os.memfd_create("said"), "w+") as said:
        fork = forks.popen([str(script)], cwd=tree, env=environment, stdout=said, stderr=said, imported=(__name__,))
        try:
            code = fork.wait(120)
        finally:
            fork.kill()
        said.seek(0)
        return code, said.read()


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code, and all that was printed."""
    said, _ = process.communicate(timeout=120)
    return process.returncode, said


def snapshot(tree: Path) -> dict[str, tuple[Any, ...]]:
    """Everything about the user's files that a tuning run may not change."""
    found = {}
    for path in [tree, *sorted(tree.rglob("*"))]:
        status = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        names = sorted(os.listdir(path)) if path.is_dir() and not path.is_symlink() else None
        attributes = os.listxattr(path, follow_symlinks=False) if hasattr(os, "listxattr") else []
        numbers = (status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, status.st_nlink, status.st_ino)
        found[str(path.relative_to(tree))] = (content, names, attributes, *numbers)
    return found


def plant(tree: Path) -> None:
    """A user's folder with something of each kind."""
    (tree / "ckpt" / "step-1").mkdir(parents=True)
    (tree / "ckpt" / "step-1" / "model.bin").write_bytes(b"weights" * 100)
    (tree / "ckpt" / "latest").symlink_to("step-1")
    (tree / "model.pt").write_bytes(b"old model")
    (tree / "model.pt").chmod(0o640)
    os.link(tree / "model.pt", tree / "hard.pt")
    (tree / "log.txt").write_text("line 1\n")
    (tree / "empty").mkdir()
    (tree / "outside").symlink_to(tree.parent / "elsewhere")
    (tree.parent / "elsewhere").mkdir()
    (tree.parent / "elsewhere" / "far.txt").write_text("far")
    (tree / "tool.sh").write_text("#!/bin/sh\nrm model.pt\n")
    (tree / "tool.sh").chmod(0o755)


def guard_as_told() -> None:
    """In a Python process that the script has started."""
    if "AUTODDP_WORKER_ISOLATION" in os.environ:
        _start(IsolationPlan.parse(os.environ["AUTODDP_WORKER_ISOLATION"]))


def _start(plan: IsolationPlan) -> None:
    """As `worker.process.isolated`."""
    pipes = Pipes(plan.began)
    children.INJECT = os.environ["PYTHONPATH"].partition(os.pathsep)[0]  # in tests this sitecustomize starts the guard
    children.watch_children(plan.text())
    start_guard(plan, stop, pipes)
    watch_clients(stop, pipes, by_kernel=True)


if __name__ == "__main__":
    sys.exit("imported by scripts")
