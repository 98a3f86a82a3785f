"""Where a run takes place: folders of its own for work, home, /tmp and /dev/shm, so that all it leaves can be seen.

    with Room(user=None) as room:
        room.prepare(traces)
        before = room.look()
        finished = room.run(command)
        print(difference(before, room.look()))

Other people use /tmp and /dev/shm at the same time. A process with the right to mount therefore gives the run its own
(bind mounts in a mount namespace); without that right only what carries the traces' names is looked at.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launchers import ROOT, environment

from traces.snapshot import Entry, take
from traces.trace import PREPARING, Trace

ORDINARY = 23456  # a user whom nobody has given a name; the run gets USER and HOME by its environment
OLD = 1_600_000_000 * 10**9  # in 2020: what is touched today differs
PARTS = ("work", "home", "tmp", "elsewhere", "shm")


@dataclass
class Finished:
    """A run that has ended."""

    returncode: int
    output: str
    timed_out: bool


@dataclass
class Room:
    """The folders of one run. `user` is whom it runs as, None for oneself. `private`: /tmp and /dev/shm of its own."""

    user: int | None = None
    private: bool = field(default_factory=lambda: may_have_own_tmp())
    base: Path = field(init=False)
    shm: Path = field(init=False)

    def __enter__(self) -> Room:
        # not below /tmp: a run with a /tmp of its own would not see it
        self.base = Path(tempfile.mkdtemp(prefix="autoddp-traces-", dir="/var/tmp"))
        self.shm = Path(tempfile.mkdtemp(prefix="autoddp-traces-", dir="/dev/shm"))
        for part in (*PARTS[:-1], "out"):
            (self.base / part).mkdir()
        self.base.chmod(0o755)
        self._own(self.base / "out")
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.base, ignore_errors=True)
        shutil.rmtree(self.shm, ignore_errors=True)
        if not self.private:
            for top in ("/tmp", "/dev/shm"):
                shutil.rmtree(Path(top) / self.base.name, ignore_errors=True)

    @property
    def out(self) -> Path:
        """All that the run may write: autoddp's output folder, the recipe, the reports."""
        return self.base / "out"

    @property
    def work(self) -> Path:
        return self.base / "work"

    def part(self, name: str) -> Path:
        """One of PARTS, as seen from outside."""
        if name not in ("tmp", "shm"):
            return self.base / name
        if self.private:
            return self.shm if name == "shm" else self.base / "tmp"
        return Path("/tmp" if name == "tmp" else "/dev/shm") / self.base.name

    def prepare(self, traces: Iterable[Trace]) -> None:
        """The user's state, old and, where the run has a user, his."""
        for part in PARTS:
            self.part(part).mkdir(exist_ok=True)
        PREPARING.tops = {part: self.part(part) for part in PARTS}  # where they are seen from outside
        try:
            for trace in traces:
                folder = self.work / trace.name
                folder.mkdir(exist_ok=True)
                trace.prepare(folder)
        finally:
            PREPARING.tops = None
        self.settle()

    def settle(self) -> None:
        """Make everything old, each path by another second: an order by time is then one by name."""
        for part in PARTS:
            self.part(part).mkdir(exist_ok=True)
            self._own(self.part(part))
            if part in ("tmp", "shm") and self.private:
                self.part(part).chmod(0o1777)
            paths = sorted([self.part(part), *self.part(part).rglob("*")], reverse=True)
            for number, path in enumerate(paths):  # what a folder holds before the folder
                time = OLD + (len(paths) - number) * 10**9 + 123_456_789
                os.utime(path, ns=(time, time), follow_symlinks=False)

    def look(self) -> dict[str, Entry]:
        """Everything but `out`, by part and path: `work/save_over/model.pt`."""
        found: dict[str, Entry] = {}
        for part in PARTS:
            found.update({f"{part}/{path}": entry for path, entry in take(self.part(part)).items()})
            if part in ("tmp", "shm"):
                found.pop(f"{part}/.")  # there everybody makes and removes files; what stays is seen
        found.update({f"base/{path}": entry for path, entry in take(self.base, deep=False).items() if path != "out"})
        for entry in PARTS[:-1]:
            found.pop(f"base/{entry}", None)
        return found

    def run(self, command: Sequence[str], env: Mapping[str, str] | None = None, patience: float = 300) -> Finished:
        """Run a command in `work`, until it ends or patience does; all that it started is then killed."""
        process = subprocess.Popen(
            [*self.prefix(), *command],
            cwd=self.work,
            env=self.environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        timed_out = False
        try:
            output, _ = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            timed_out = True
            output = self._end(process)
        return Finished(process.returncode, output, timed_out)

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """The run's environment: home, user, and no byte code written beside the sources."""
        own = {name: value for name, value in environment().items() if name not in ("TMPDIR", "TEMP", "TMP")}
        who = {} if self.user is None else {"USER": "ordinary", "LOGNAME": "ordinary"}
        places = {} if self.private else {"TRACES_TMP": str(self.part("tmp")), "TRACES_SHM": str(self.part("shm"))}
        return {
            **own,
            **who,
            **places,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "campaigns", ROOT / "tests"))),
            "HOME": str(self.base / "home"),
            "TRACES_ELSEWHERE": str(self.base / "elsewhere"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            **(more or {}),
        }

    def prefix(self) -> list[str]:
        """What stands before the command: the namespace with its own folders, and the change of user."""
        as_user = []
        if self.user is not None:
            as_user = ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups", "--"]
        if not self.private:
            return as_user
        lines = [f"mount --bind {self.base}/tmp /tmp", f"mount --bind {self.shm} /dev/shm"]
        if self.user is not None:
            lines += _readable_interpreter()
        script = " && ".join(["set -e", *lines, 'cd "$PWD"', 'exec "$@"'])
        return ["unshare", "-m", "--propagation", "private", "bash", "-c", script, "room", *as_user]

    def _end(self, process: subprocess.Popen[Any]) -> str:
        """End the session of a command that takes too long: first politely."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            try:
                return str(process.communicate(timeout=10)[0])
            except subprocess.TimeoutExpired:
                continue
        return ""

    def _own(self, top: Path) -> None:
        if self.user is not None:
            for path in [top, *top.rglob("*")]:
                os.chown(path, self.user, self.user, follow_symlinks=False)


def may_bind() -> bool:
    """Whether this process may mount in a namespace of its own."""
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-m", "--propagation", "private", "mount", "--bind", "/tmp", "/mnt"]
    return subprocess.run(command, capture_output=True).returncode == 0


def may_have_own_tmp() -> bool:
    """Whether a run may have a /tmp of its own: not where the interpreter or this checkout lies in /tmp."""
    needed = [Path(sys.prefix), Path(sys.base_prefix), ROOT]
    return may_bind() and not any(path.resolve().is_relative_to("/tmp") for path in needed)


def _readable_interpreter() -> list[str]:
    """Commands that let an ordinary user reach the interpreter and the checkout, should they be in root's private home.

    Nothing on disk is changed: in the run's mount namespace an empty folder lies over the home, these two in it.
    """
    needed = [Path(sys.executable).resolve().parents[1], Path(sys.prefix), Path(__file__).resolve().parents[2]]
    closed: dict[Path, list[Path]] = {}
    for place in needed:
        first = next((above for above in reversed(place.parents) if not os.stat(above).st_mode & 0o001), None)
        if first is not None:
            closed.setdefault(first, []).append(place)
    lines = []
    for folder, places in closed.items():
        lines.append("mount -t tmpfs -o mode=755 tmpfs /mnt")
        places = [place for place in places if not any(other in place.parents for other in places)]
        for number, place in enumerate(places):
            lines += [f"mkdir /mnt/{number}", f"mount --bind {place} /mnt/{number}"]
        lines.append(f"mount -t tmpfs -o mode=755 tmpfs {folder}")
        for number, place in enumerate(places):
            lines += [f"mkdir -p {place}", f"mount --move /mnt/{number} {place}"]
        lines.append("umount /mnt")
    return lines
