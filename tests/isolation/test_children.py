"""Python programs that the script starts check themselves, whatever environment it gives them, or tuning ends first.

Real processes, as in a tuning attempt: a script under a plan, its children, and the launcher's socket. The other
machine is store.invalid.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import venv
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import pytest

from autoddp.isolation import Level
from autoddp.isolation.children import INJECT, VARIABLE, checks_itself
from autoddp.isolation.plan import IsolationPlan
from autoddp.wire import StopTuning, decode

PUSH = "from urllib.request import urlopen\nurlopen('http://store.invalid/x', b'data')\n"
SENDS = "http.client sends POST to store.invalid"

UPLOADS = {
    "another PYTHONPATH": ("subprocess.run([sys.executable, 'push.py'], env={**os.environ, 'PYTHONPATH': '.'})", SENDS),
    "no environment": ("subprocess.run([sys.executable, 'push.py'], env={})", SENDS),
    "found on PATH": ("subprocess.run(['python', '-m', 'push'], env={'PATH': os.environ['PATH']})", SENDS),
    "below a shell": ("subprocess.run('python push.py', shell=True, env={'PATH': os.environ['PATH']})", SENDS),
    "below a shell script": ("subprocess.run(['sh', 'run.sh'], env={'PATH': os.environ['PATH']})", SENDS),
    "execve": ("os.execve(sys.executable, [sys.executable, 'push.py'], {})", SENDS),
    "execv": ("os.environ.clear(); os.execv(sys.executable, [sys.executable, 'push.py'])", SENDS),
    "execle": ("os.execle(sys.executable, sys.executable, 'push.py', {})", SENDS),
    "spawnve": ("os.spawnve(os.P_WAIT, sys.executable, [sys.executable, 'push.py'], {})", SENDS),
    "posix_spawn": (
        "os.waitpid(os.posix_spawn(sys.executable, [sys.executable, 'push.py'], {}), 0)", SENDS,
    ),
    "posix_spawnp": (
        "os.waitpid(os.posix_spawnp('python', ['python', 'push.py'], {'PATH': os.environ['PATH']}), 0)", SENDS,
    ),
    "without closing": ("subprocess.run([sys.executable, 'push.py'], env={}, close_fds=False)", SENDS),
    "system": ("os.environ['PYTHONPATH'] = '.'; os.system('python push.py')", SENDS),
    "putenv": ("os.putenv('PYTHONPATH', '.'); subprocess.run([sys.executable, 'push.py'])", SENDS),
    "putenv, system": ("os.putenv('PYTHONPATH', '.'); os.system('python push.py')", SENDS),
    "putenv, execv": ("os.putenv('PYTHONPATH', '.'); os.execv(sys.executable, [sys.executable, 'push.py'])", SENDS),
    "unsetenv": (
        f"os.unsetenv('PYTHONPATH'); os.unsetenv('{VARIABLE}'); subprocess.run([sys.executable, 'push.py'])", SENDS,
    ),
    "multiprocessing": (
        "import multiprocessing as m, runpy; os.environ.clear()\n"
        "p = m.get_context('spawn').Process(target=runpy.run_path, args=('push.py',)); p.start(); p.join()",
        SENDS,
    ),
}  # fmt: skip
"""Code, and how the reason must read. In a real attempt the first message ends it."""


class Launcher:
    """The launcher's end of the socket. It hears why tuning must end, and answers by closing the connection."""

    def __init__(self, socket: str) -> None:
        self.reasons: list[str] = []
        self._heard_all = threading.Semaphore(0)
        self._leaves = False
        self._listener = Listener(socket, family="AF_UNIX")
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            with self._listener.accept() as connection:
                text = connection.recv_bytes()
            if not text and self._leaves:
                return
            if not text:
                self._heard_all.release()
                continue
            said = decode(text)
            assert isinstance(said, StopTuning)
            self.reasons.append(said.reason)

    def _hear_all(self) -> None:
        with Client(self._listener.address, family="AF_UNIX") as client:
            client.send_bytes(b"")

    def reasons_until_now(self) -> list[str]:
        """What it was told since the last time."""
        self._hear_all()
        self._heard_all.acquire()
        found, self.reasons = self.reasons, []
        return found

    def leave(self) -> None:
        self._leaves = True
        self._hear_all()
        self._thread.join()
        self._listener.close()


def attempt(
    tmp_path: Path, body: str, level: Level = Level.OFF, by_kernel: bool = True
) -> tuple[Launcher, dict[str, Any]]:
    """A launcher, and how the script is started that it isolates."""
    tree, temporary = tmp_path / "tree", tmp_path / "t"
    tree.mkdir()
    temporary.mkdir()
    (tree / "push.py").write_text(PUSH)
    (tree / "run.sh").write_text("python push.py\n")
    (tree / "script.py").write_text(f"import json, os, subprocess, sys\nif __name__ == '__main__':\n{body}")
    plan = IsolationPlan(
        level, str(tmp_path / "s"), str(tmp_path / "scratch"), (str(temporary),), programs_are_watched=by_kernel
    )
    variables = {
        VARIABLE: plan.text(),
        "PYTHONPATH": INJECT,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TMPDIR": str(temporary),
    }
    start = {"args": [sys.executable, "script.py"], "cwd": tree, "env": {**os.environ, **variables}, "text": True}
    return Launcher(plan.socket), start


def ended(tmp_path: Path, code: str, level: Level = Level.OFF, by_kernel: bool = True) -> tuple[str, str]:
    """The first reason why the launcher is asked to end tuning, or "", and what was printed."""
    launcher, start = attempt(tmp_path, textwrap.indent(code, "    "), level, by_kernel)
    try:
        done = subprocess.run(**start, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
    finally:
        launcher.leave()
    return next(iter(launcher.reasons), ""), done.stdout


RUNS_EACH = """
    for line in sys.stdin:
        name, code = json.loads(line)
        child = os.fork()
        if not child:
            os.dup2(os.open(f"{name}.printed", os.O_WRONLY | os.O_CREAT), 1)
            os.dup2(1, 2)
            exec(code)
            os._exit(0)
        os.waitpid(child, 0)
        print(name, flush=True)
"""


@pytest.fixture(scope="module")
def uploads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """Of each case: the first reason why the launcher was asked to end tuning, and what was printed.

    One script has started, and a fork of it runs each case. The child begins from nothing.
    """
    found = {}
    launcher, start = attempt(tmp_path_factory.mktemp("uploads"), RUNS_EACH)
    try:
        with subprocess.Popen(**start, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as script:
            assert script.stdin is not None
            assert script.stdout is not None
            for name, (code, _) in UPLOADS.items():
                print(json.dumps([name, code]), file=script.stdin, flush=True)
                assert script.stdout.readline() == f"{name}\n"
                found[name] = (
                    next(iter(launcher.reasons_until_now()), ""),
                    (start["cwd"] / f"{name}.printed").read_text(),
                )
            script.stdin.close()
    finally:
        launcher.leave()
    return found


@pytest.mark.parametrize("name", UPLOADS)
def test_an_upload_of_a_child_ends_tuning(uploads: dict[str, tuple[str, str]], name: str) -> None:
    said, printed = uploads[name]
    assert UPLOADS[name][1] in said, printed


def test_under_the_guard_too(tmp_path: Path) -> None:
    said, printed = ended(tmp_path, UPLOADS["found on PATH"][0], Level.GUARD)
    assert SENDS in said, printed


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (UPLOADS["found on PATH"][0], SENDS),
        (UPLOADS["below a shell"][0], SENDS),
        (UPLOADS["below a shell script"][0], "sh may change something outside this run, and this kernel"),
        ("subprocess.run([sys.executable, '-I', 'push.py'])", "python may change something outside this run"),
        ("os.system('env -i python push.py')", "env may change something outside this run"),
        ("subprocess.run(['git', 'commit'])", "git may change something outside this run"),
        ("subprocess.run(['git', 'push'])", "git changes something outside this run (git push)"),
    ],
)
def test_where_the_kernel_does_not_show_what_programs_do(tmp_path: Path, code: str, why: str) -> None:
    said, printed = ended(tmp_path, code, by_kernel=False)
    assert why in said, printed


NO_HOLD = """
from autoddp.isolation.elsewhere import programs
def refuses(*_):
    raise OSError("by this kernel")
programs.{} = refuses
watch = programs.ProgramWatch(os.environ["AUTODDP_WORKER_ISOLATION"])
assert not watch.hold()
watch.judge_ranks([])
watch.judge_ranks(["python", "train.py"])
print("passed", flush=True)
watch.judge_ranks(["./run.sh", "train.py"])
print("not reached", flush=True)
"""


@pytest.mark.parametrize("refused", ["hold_calls", "os.open"])
def test_ranks_that_are_no_python_where_the_kernel_does_not_show_what_they_do(tmp_path: Path, refused: str) -> None:
    said, printed = ended(tmp_path, NO_HOLD.format(refused))
    assert said.startswith("run.sh may change something outside this run, and this kernel")
    assert printed == "passed\n"


PASSES = """
same = {**os.environ, "PYTHONPATH": "."}
say = "import os; print(os.environ['PYTHONPATH'].partition(os.pathsep)[2])"
print(subprocess.check_output([sys.executable, "-c", say], env=same, text=True).strip())
subprocess.check_call([sys.executable, "-I", "--version"])
os.putenv("PYTHONPATH", "..")
print(subprocess.check_output([sys.executable, "-c", say], text=True).strip())
os.system("PYTHONPATH=.:$PYTHONPATH python -c 'print(1)'")
os.environ["LANGUAGE"] = "old"
os.putenv("LANGUAGE", "new")
del os.environ["PYTHONPATH"]
say = "import os; print(os.environ['LANGUAGE'])"
print(subprocess.check_output([sys.executable, "-c", say], text=True).strip())
os.system(f'{sys.executable} -c "{say}"')
assert os.execve in os.supports_fd
try:
    os.execve(sys.executable, [sys.executable, "-c", "print(2)"], 3)
except TypeError:
    print("as without autoddp")
"""


def test_what_a_child_sees(tmp_path: Path) -> None:
    said, printed = ended(tmp_path, PASSES)
    assert said == "", printed
    lines = [line for line in printed.splitlines() if "Python 3" not in line]
    assert lines == [".", "..", "1", "new", "new", "as without autoddp"]


@pytest.fixture
def another_python(tmp_path: Path) -> str:
    """It lacks the packages that autoddp needs, as that of a tool which pipx or conda has installed."""
    venv.create(tmp_path / "venv", symlinks=True)
    return f"{tmp_path}/venv/bin/python"


def test_another_python_is_any_program_where_the_kernel_shows_what_it_does(tmp_path: Path, another_python: str) -> None:
    code = f"subprocess.check_call(['{another_python}', '-c', 'print(1)'])"
    assert ended(tmp_path, code, Level.OVERLAY) == ("", "1\n")


@pytest.mark.parametrize(
    ("level", "env"), [(Level.GUARD, "None"), (Level.OVERLAY, "{**os.environ, 'AUTODDP_WORKER_TUNES': '{}'}")]
)
def test_another_python_ends_tuning_under_guard_and_as_a_rank(
    tmp_path: Path, another_python: str, level: Level, env: str
) -> None:
    said, printed = ended(tmp_path, f"subprocess.check_call(['{another_python}', '-c', 'print(1)'], env={env})", level)
    assert said.startswith(f"the script starts {another_python}, where autoddp cannot run: "), printed
    assert "wrapt" in said


@pytest.mark.parametrize(("before", "has_mark", "lists"), [(0, True, False), (100, True, True), (0, False, True)])
def test_who_checks_itself(before: int, has_mark: bool, lists: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection of a rank waits for the answer. A rank with a thousand groups has some thousand files."""
    code = (
        "import os, sys; from autoddp.isolation.children import mark_as_checked; "
        f"files = [os.open(os.devnull, os.O_RDONLY) for _ in range({before})]; "
        f"assert not {has_mark} or mark_as_checked(); "
        "files += [os.open(os.devnull, os.O_RDONLY) for _ in range(100)]; print(flush=True); sys.stdin.read()"
    )
    listed = []
    monkeypatch.setattr(os, "listdir", lambda path, of_all=os.listdir: listed.append(path) or of_all(path))
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert checks_itself(child.pid) is has_mark
    assert bool(listed) is lists
