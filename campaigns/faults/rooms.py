"""A place for launchers that shows what they leave behind: hosts of its own, a home and a temporary folder of its own.

    with Room(hosts=2) as room:
        room.launch(["--nproc-per-node", "1", ..., "train.py"], host=0)
        ...
        assert room.left() == []

As root each host is a lab's, also where there is only one: nobody else listens, mounts anything or has shared memory
there. Without root, ports, mounts and shared memory are not looked at.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lab import Lab, unavailable
from launchers import AUTODDP, Launch, start

from autoddp.runs.folder import PREFIX
from autoddp.runs.owner import marked_in

_NOT_OURS = ("torch", "pymp")
"""Temporary files that torch and Python leave under torchrun too."""
_EXPECTED = (".autoddp", "*.autoddp.toml")
_LISTENING = "0A"  # in /proc/net/tcp


class Room:
    """`said` is what all launchers have printed; `folder` holds one working folder for each host, and the home."""

    def __init__(self, hosts: int = 1) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="faults-", dir="/var/tmp"))
        # a socket's path may not be long
        self.temporary = Path(tempfile.mkdtemp(prefix="f", dir="/tmp"))
        self.home = self.folder / "home"
        self.home.mkdir()
        self.hosts = hosts
        self.state: Path | None = None
        """Where run folders and recipes may be, beside the working folders."""
        self.launches: list[Launch] = []
        self._ended = contextlib.ExitStack()
        self._ended.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self._ended.callback(shutil.rmtree, self.temporary, ignore_errors=True)
        self.lab: Lab | None = None
        try:
            for host in range(hosts):
                self.work(host).mkdir()
            if hosts > 1 or not unavailable():
                self.lab = self._ended.enter_context(Lab(hosts=hosts))
                for host in range(hosts):
                    self.lab.run(host, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
            self._mounts = [self._mounted(host) for host in range(hosts)]
        except BaseException:
            self._ended.close()
            raise

    def __enter__(self) -> Room:
        return self

    def __exit__(self, *_: object) -> None:
        for launch in self.launches:
            launch.kill()
            if launch.process.poll() is None:
                launch.process.kill()
            launch.process.wait()
        self._ended.close()

    def work(self, host: int) -> Path:
        """The folder in which a host's launcher runs."""
        return self.folder / f"host{host}"

    def launch(
        self,
        words: Sequence[str],
        env: Mapping[str, str] | None = None,
        host: int = 0,
        command: Sequence[str] = AUTODDP,
    ) -> Launch:
        """Start one launcher."""
        popen = None if self.lab is None else functools.partial(self.lab.popen, host)
        full = {
            "TMPDIR": str(self.temporary),
            "HOME": str(self.home),
            "OMP_NUM_THREADS": "1",
            "OUT": str(self.folder),
            **(env or {}),
        }
        launch = start(command, self.work(host), words, full, popen=popen)
        self.launches.append(launch)
        return launch

    def mount(self, host: int, *arguments: str) -> None:
        """Mount something on a host; `left` does not count it. Needs the lab."""
        assert self.lab is not None, unavailable()
        self.lab.run(host, "mount", *arguments)
        self._mounts[host] = self._mounted(host)

    @property
    def said(self) -> str:
        return "".join(launch.stderr for launch in self.launches)

    @property
    def ended(self) -> bool:
        """Whether all launchers have ended."""
        return all(launch.process.poll() is not None for launch in self.launches)

    @property
    def codes(self) -> list[int | None]:
        """The launchers' exit codes; None: it runs."""
        return [launch.process.poll() for launch in self.launches]

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Until all launchers have ended or the condition holds; False if that took longer."""
        limit = time.monotonic() + seconds
        while not self.ended and not until():
            if time.monotonic() > limit:
                return False
            time.sleep(0.02)
        return True

    def wait_for_said(self, pattern: str, seconds: float, host: int = 0) -> bool:
        """Until a host's launcher has printed that; False if it has ended, or the time is over."""
        launch = self.launches[host]
        self.wait(seconds, lambda: bool(re.search(pattern, launch.stderr)) or launch.process.poll() is not None)
        return bool(re.search(pattern, launch.stderr))

    def ranks(self, script: str) -> dict[int, int]:
        """Rank → process, of those that run this script now."""
        found = {}
        for launch in self.launches:
            for pid in launch.processes():
                with contextlib.suppress(OSError):
                    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    rank = next((e[5:] for e in environment if e.startswith(b"RANK=")), None)
                    if rank is not None and script.encode() in words and b"-c" not in words:
                        found[int(rank)] = pid
        return found

    def left(self, within: float = 10.0, expected: Sequence[str] = _EXPECTED) -> list[str]:
        """What is still there after so many seconds; `expected` are the working folders' files that may be there."""
        limit = time.monotonic() + within
        while (found := self._left(expected)) and time.monotonic() < limit:
            time.sleep(0.1)
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return found

    def _processes(self) -> set[int]:
        found = {pid for launch in self.launches for pid in launch.processes()}
        if self.lab is not None:
            found.update(pid for host in range(self.hosts) for pid in self.lab.processes(host))
        return found

    def _left(self, expected: Sequence[str]) -> list[str]:
        found = [f"process {pid}: {_command(pid)}" for pid in self._processes()]
        if found:  # all the rest may still be in use
            return found
        mine = [path for path in self.temporary.iterdir() if not path.name.startswith(_NOT_OURS)]
        found += [f"file {path}" for path in mine if path != self.state]
        found += [f"file {path}" for path in self.folder.glob("host*/.autoddp/2*/autoddp-*")]
        found += [f"file {path}" for path in self.folder.glob("host*/.autoddp/2*/attempt*/scratch")]
        found += [f"file {path}" for path in self.home.rglob("*") if path.is_file() and not self._is_state(path)]
        if self.state is not None:
            found += [f"file {path}" for path in self.state.glob("*/runs/*/autoddp-*")]
            found += [f"file {path}" for path in self.state.glob("*/runs/*/attempt*/scratch")]
        for host in range(self.hosts):
            files = [path for path in self.work(host).iterdir() if not any(path.match(name) for name in expected)]
            found += [f"file {path}" for path in files]
        ours = {launch.process.pid for launch in self.launches}
        for place in ("/tmp", "/var/tmp"):
            marked = [folder for folder in marked_in(Path(place), PREFIX) if folder.mark.owner.pid in ours]
            found += [f"file {folder.path}" for folder in marked]
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        found += [f"mount {line}" for line in mounts if str(self.folder) in line or str(self.temporary) in line]
        for host in range(self.hosts):
            found += [f"mount on host {host}: {line}" for line in self._mounted(host) - self._mounts[host]]
            found += self._open_on(host)
        return found

    def _is_state(self, path: Path) -> bool:
        return self.state is not None and self.state in path.parents

    def _mounted(self, host: int) -> set[str]:
        if self.lab is None:
            return set()
        return set(self.lab.run(host, "cat", "/proc/self/mountinfo").splitlines())

    def _open_on(self, host: int) -> list[str]:
        if self.lab is None:
            return []
        names = [name for name in self.lab.run(host, "ls", "-A", "/dev/shm").split() if "faketime" not in name]
        sockets = [line.split() for line in self.lab.run(host, "cat", "/proc/net/tcp", "/proc/net/tcp6").splitlines()]
        ports = [words[1] for words in sockets if words[3:4] == [_LISTENING]]
        return [f"shared memory {name}" for name in names] + [f"port {port}" for port in ports]


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return ""
