"""torchrun and autoddp side by side: the same words, environment and folder layout, one body for both.

    both = side_by_side(tmp_path, ["--nproc-per-node", "2", REPORTER, "--exit", "7"])
    assert both["autoddp"].returncode == both["torchrun"].returncode

Both run at the same time, each in a folder of its own, which scripts know as OUT. In a word or in a variable's value,
`{out}` stands for it, and `{port}` for a free port.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forks
import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "tests" / "scripts"
REPORTER = str(SCRIPTS / "reporter.py")
SEVERAL = str(SCRIPTS / "several.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
AUTODDP = (sys.executable, "-m", "autoddp")
SIDES = {"torchrun": TORCHRUN, "autoddp": (*AUTODDP, "--trials", "0")}
FROM_NOTHING = "TESTS_START_FROM_NOTHING"
"""Variable that conftest.py sets under --whole: every launcher is a Python of its own."""
PATIENCE = 600 if FROM_NOTHING in os.environ else 150
"""Seconds. A launch takes 2 to 10, and many times that on a machine that is busy elsewhere, more so where each of many
scripts in one launch imports torch anew."""

# A shell starts what follows a `&` with SIGINT ignored, and that is inherited: a launcher would never see Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

_LAUNCHERS_OWN = re.compile("PET_|AUTODDP|TORCHELASTIC|OMP_NUM_THREADS|MASTER_|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)")


@dataclass
class Launch:
    """A launcher at work, or ended; all that it starts carries a mark in its environment."""

    process: subprocess.Popen[Any] | forks.Fork
    folder: Path
    mark: str
    words: Sequence[str] = field(repr=False)

    @property
    def returncode(self) -> int:
        assert self.process.returncode is not None, "still running"
        return int(self.process.returncode)

    @property
    def stdout(self) -> str:
        return Path(f"{self.folder}.stdout").read_text()

    @property
    def stderr(self) -> str:
        return Path(f"{self.folder}.stderr").read_text()

    def wait(self) -> Launch:
        """Until the launcher ends; a launch that does not end fails the test and is killed."""
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running: {' '.join(self.words)}\n{self.stderr[-3000:]}") from None
        finally:
            if self.process.returncode is None:
                self.kill()
        return self

    def processes(self) -> list[int]:
        """Living processes that this launch started, in whatever session; zombies have no environment."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def training(self, script: str) -> list[int]:
        """The ranks of a script that have joined their process group: gloo has threads of its own."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if words[1:3] == ["-u", script] and len(os.listdir(f"/proc/{pid}/task")) > 2:
                    found.append(pid)
        return found

    def kill(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def reports(self) -> dict[str, dict[str, Any]]:
        """What reporter.py left behind, by file name."""
        return {path.name: json.loads(path.read_text()) for path in sorted(self.folder.glob("report*.json"))}

    def anonymous(self, text: str) -> str:
        """Text without what differs between any two launches: folder, mark, times, ids, ports."""
        text = text.replace(str(self.folder), "<out>").replace(self.mark, "<mark>")
        text = re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "<uuid>", text)
        text = re.sub(r"\d{4}-\d{2}-\d{2}[_ ]\d{2}:\d{2}:\d{2}", "<time>", text)
        text = re.sub(r"(pid:? |PID |\b[Pp]rocess )\d+", r"\1<pid>", text)
        return re.sub(r"/tmp/torchelastic_\w+/(\S+?)_\w{8}/", r"<tmp>/\1/", text)


def unwrapped(text: str) -> str:
    """What launchers have said, each line that was wrapped as one line again; srun may have put a number in front."""
    return re.sub(r"\n(\d+: )?autoddp:   ", " ", text)


def chosen(request: Any, test: str, parameter: str) -> list[Any]:
    """That test's values of that parameter which are run at all: `make test` samples the long matrices."""
    return [item.callspec.params[parameter] for item in request.session.items if item.originalname == test]


def whole(*values: Any) -> Any:
    """A parameter's value that is left to `make test-whole`."""
    return pytest.param(*values, marks=pytest.mark.whole)


def with_limits(seconds: dict[str, float]) -> tuple[str, ...]:
    """The command autoddp with other limits of its modules: waits of minutes become some of seconds."""
    names = [name.rpartition(".") for name in seconds]
    lines = [f"import autoddp.{module}" for module, _, _ in names]
    lines += [f"autoddp.{name} = {limit}" for name, limit in seconds.items()]
    lines += ["import sys; from autoddp.cli.main import main; sys.argv[0] = 'autoddp'; main()"]
    return sys.executable, "-c", "\n".join(lines)


BRIEF_STUDY = {
    "study.finals.MOST_ROUNDS": 3,
    "study.budget._MOST": 6,
    "study.budget._MORE_HEADROOM_ROUNDS": 1,
    **dict.fromkeys(
        ("study.budget._SETTLING", "study.budget._GAINER_SECONDS", "study.budget._SEMIFINAL_SECONDS"), 0.05
    ),
}
"""Limits of a study that makes few rounds, of few steps each: for tests that are not about how sure its answer is."""
BRIEF = with_limits(BRIEF_STUDY)
"""The command autoddp with such a study, which takes a third less CPU time."""


def environment(**more: str) -> dict[str, str]:
    """This process's environment, without what launchers set or read, and with the checkout to import from first."""
    own = {name: value for name, value in os.environ.items() if not _LAUNCHERS_OWN.match(name)}
    # Most tests read what is shown in full; tests/report/test_answer.py reads what is shown by default.
    return {**own, "PYTHONPATH": forks.paths(), "AUTODDP_VERBOSE": "1", **more}


def start(
    command: Sequence[str], folder: Path, words: Sequence[str], env: Mapping[str, str] | None = None, popen: Any = None
) -> Launch:
    """Start one launcher in its folder; `popen` may be a lab host's (functools.partial(lab.fork, 0)).

    Without one, a launcher in Python is a fork of a process that has imported torch; `subprocess.Popen` starts it from
    nothing, where a test is about processes. Under --whole all of them start from nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark = f"mark-{uuid.uuid4().hex}"
    port = free_port()
    argv = [*command, *(word.replace("{out}", str(folder)).replace("{port}", port) for word in words)]
    more = {name: value.replace("{out}", str(folder)) for name, value in (env or {}).items()}
    full = {**environment(), "OUT": str(folder), "LAUNCH_MARK": mark, **more}
    with open(f"{folder}.stdout", "a") as stdout, open(f"{folder}.stderr", "a") as stderr:
        forks.STARTS["new"] += popen is subprocess.Popen
        process = (popen or forked)(argv, cwd=folder, env=full, stdout=stdout, stderr=stderr)
    return Launch(process, folder, mark, argv)


def forked(argv: Sequence[str], **options: Any) -> subprocess.Popen[Any] | forks.Fork:
    """A launcher as `start` makes it where nothing else is asked for."""
    if argv[0] == sys.executable and FROM_NOTHING not in os.environ:
        return forks.popen(argv[1:], **options)
    forks.STARTS["new"] += 1
    return subprocess.Popen(argv, **options)


def run_python(words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """`python WORDS` to its end: as `forked`."""
    if FROM_NOTHING not in os.environ:
        return forks.run(words, **options)
    forks.STARTS["new"] += 1
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, **options)


_PORTS_OF_A_WORKER = 1400
_next_port = random.SystemRandom().randrange(_PORTS_OF_A_WORKER)


def free_port() -> str:
    """A port that nobody listens on, and that nobody gets by chance meanwhile.

    It is below those that the kernel gives to whoever asks for any port, and each worker of xdist has ports of its own:
    a launcher that waits for its endpoint would else find what another test has opened there.
    """
    global _next_port
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 16
    while True:
        _next_port = (_next_port + 1) % _PORTS_OF_A_WORKER
        port = 10_240 + worker * _PORTS_OF_A_WORKER + _next_port
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return str(port)


def side_by_side(parent: Path, words: Sequence[str], env: Mapping[str, str] | None = None) -> dict[str, Launch]:
    """Run the same words under torchrun and autoddp, to the end."""
    launches = {side: start(command, parent / side, words, env) for side, command in SIDES.items()}
    try:
        return {side: launch.wait() for side, launch in launches.items()}
    finally:
        for launch in launches.values():
            if launch.process.poll() is None:
                launch.kill()


def may_mount() -> bool:
    """Whether this process may mount over the kernel's lists, in a mount namespace of its own; and has two CPUs."""
    if shutil.which("unshare") is None or len(os.sched_getaffinity(0)) < 2:
        return False
    return subprocess.run(["unshare", "-m", "mount", "--bind", "/tmp", "/mnt"], capture_output=True).returncode == 0


def on_numa_nodes(folder: Path, *nodes: str) -> list[str]:
    """A command in front of another one: there the kernel lists NUMA nodes with these CPUs, such as `0-3,8`."""
    listed = list_numa_nodes(folder, *nodes)
    return ["unshare", "-m", "bash", "-c", f'mount --bind {listed} /sys/devices/system/node && exec "$@"', "--"]


@contextlib.contextmanager
def popen_behind(in_front: Sequence[str]) -> Iterator[Any]:
    """A `popen` for `start`, of launchers behind a command that changes what they see, as `unshare -m …`."""
    if FROM_NOTHING in os.environ:
        yield lambda argv, **options: forked([*in_front, *argv], **options)
        return
    holder = subprocess.Popen([*in_front, "sh", "-c", "echo; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        yield lambda argv, **options: forks.popen(argv[1:], host=holder.pid, **options)


@contextlib.contextmanager
def holds_numa_nodes(folder: Path, *nodes: str) -> Iterator[int]:
    """A process that sees such nodes: a fork with it as its `host` sees them too, see `forks.popen`."""
    words = [*on_numa_nodes(folder, *nodes), "sh", "-c", "echo; exec cat"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        yield holder.pid


def list_numa_nodes(folder: Path, *nodes: str) -> Path:
    """The folder, as the kernel would fill it."""
    for number, listed in enumerate(nodes):
        (folder / f"node{number}").mkdir(parents=True)
        (folder / f"node{number}" / "cpulist").write_text(f"{listed}\n")
    return folder


def wait_for(condition: Any, what: str, pause: float = 0.05) -> None:
    """Until `condition()` is true; `pause`: seconds between two looks, more where a look starts a process."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE} s for {what}"
        time.sleep(pause)
