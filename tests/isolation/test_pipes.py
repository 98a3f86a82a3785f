"""A named pipe that is older than the attempt: tuning ends before it is opened, by whatever name."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest
from guarded import run, snapshot

from autoddp.isolation.elsewhere.blocked import waits_at
from autoddp.isolation.kernel import landlock
from autoddp.isolation.pipes import Pipes

ROOT = Path(__file__).resolve().parents[2]

ENDS = {
    "open to write": "open('m', 'w')",
    "open to append": "open('m', 'ab', buffering=0)",
    "open to read": "open('m')",
    "whole path, to read": "open(os.path.join(os.getcwd(), 'm'))",
    "os.open": "os.open('m', os.O_WRONLY)",
    "os.open both ways": "os.open(b'm', os.O_RDWR)",
    "os.open without waiting": "os.open('m', os.O_RDONLY | os.O_NONBLOCK)",
    "io.FileIO": "import io; io.FileIO('m', 'w')",
    "pathlib": "import pathlib; pathlib.Path('m').write_text('x')",
    "whole path": "open(os.path.join(os.getcwd(), 'm'), 'w')",
    "link": "open('link', 'w')",
    "link in a folder": "os.chdir('d'); open('../link', 'w')",
    "renamed": "os.rename('m', 'n'); open('n', 'w')",
    "descriptor": "os.open(f'/dev/fd/{os.open(chr(109), os.O_PATH)}', os.O_WRONLY)",
    "logging": "import logging; logging.FileHandler('m')",
    "a child's Python": "import subprocess as s; sys.exit(s.call([sys.executable, '-c', 'open(chr(109), chr(119))']))",
}
BY_PROGRAMS = {
    "shell": "os.system('echo x > m')",
    "shell, appending": "os.system('echo x 2>>link')",
    "shell, its folder": "import subprocess; subprocess.run('echo x > ../m', shell=True, cwd='d')",
    "input of a program": "import subprocess; subprocess.run('wc -l < m', shell=True)",
    "cat": "import subprocess; subprocess.run(['cat', 'm'])",
    "dd": "import subprocess; subprocess.run(['dd', 'of=m'])",
    "variable of a program": "os.system('OUT=m cat')",
    "bash -c": "import subprocess; subprocess.run(['env', 'bash', '-c', 'ls | tee m'])",
}
PASSES = {
    "own": """
os.mkfifo("own")
ends = os.open("own", os.O_RDONLY | os.O_NONBLOCK), os.open("own", os.O_WRONLY)
os.write(ends[1], b"x")
assert os.read(ends[0], 9) == b"x"
""",
    "looked at": """
import stat
assert os.path.exists("m") and stat.S_ISFIFO(os.stat("m").st_mode) and "m" in os.listdir()
""",
    "made anew": """
os.remove("m")
os.mkfifo("m")
ends = os.open("m", os.O_RDONLY | os.O_NONBLOCK), open("m", "w")
""",
    "without a name": """
ends = os.pipe()
with open(f"/dev/fd/{ends[1]}", "w") as file:
    file.write("x")
assert os.read(ends[0], 9) == b"x"
""",
}
ALTERS = ("renamed", "made anew", "a child's Python")
"""Cases in which files change, or that need a child with the same checks: they run under guard."""

DRIVER = """
import json, os, sys, time
from autoddp.isolation.elsewhere import watch_clients
from autoddp.isolation.pipes import Pipes, watch_pipes
began = time.time()
time.sleep(0.05)  # the kernel's clock of files is coarse
def stop(reason):
    os.write(told, reason.encode())
    os._exit(77)
pipes = Pipes(began)
watch_pipes(pipes, stop)
watch_clients(stop, pipes, by_kernel=True)
said = {}
for name, code in json.load(sys.stdin).items():
    heard, told = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(2, 1)
        exec(code, {"os": os, "sys": sys})
        os._exit(0)
    os.close(told)
    said[name] = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), os.read(heard, 9999).decode()]
print(json.dumps(said))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "d").mkdir(parents=True)
    os.mkfifo(tree / "m")
    (tree / "link").symlink_to("m")
    return tree


def test_by_the_audit_hook_alone(tree: Path) -> None:
    """As under the overlay, and without isolation. A fork runs each case."""
    ends = {name: code for name, code in {**ENDS, **BY_PROGRAMS}.items() if name not in ALTERS}
    passes = {name: code for name, code in PASSES.items() if name not in ALTERS}
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], cwd=tree, env=env, input=json.dumps({**ends, **passes}), capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert {name: code for name, (code, _) in said.items()} == {**dict.fromkeys(ends, 77), **dict.fromkeys(passes, 0)}
    assert all("a named pipe that is older than this run" in said[name][1] for name in ends)
    assert said["shell"][1] == "sh is given m, a named pipe that is older than this run"


LINES = {
    "echo x > m": "m",
    "exec cat < d/../other": "d/../other",
    "echo x > own": "",
    "exec 3<>own; read x <&3": "",
    "exec sleep 60": "",
    "exec cat": "",
}
"""Line of a shell → the pipe of others at which it waits."""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="open is known on these processors")
def test_a_program_that_waits_at_a_pipe_is_found(tree: Path) -> None:
    os.mkfifo(tree / "other")
    began = time.time()
    time.sleep(0.05)  # the kernel's clock of files is coarse
    os.mkfifo(tree / "own")
    waiting = {line: subprocess.Popen(["sh", "-c", line], cwd=tree, stdin=subprocess.PIPE) for line in LINES}
    pipes, until = Pipes(began), time.monotonic() + 60
    try:
        while True:
            found = {line: waits_at(process.pid, pipes.are_others) for line, process in waiting.items()}
            if found == LINES or time.monotonic() > until:
                break
    finally:
        for process in waiting.values():
            process.kill()
            process.communicate()
    assert found == LINES


COPIED = """
import os, signal, sys, time
from autoddp.isolation import Level
from autoddp.isolation.children import VARIABLE
from autoddp.isolation.elsewhere import programs
from autoddp.isolation.pipes import Pipes
from autoddp.isolation.plan import IsolationPlan
from autoddp.processes.polling import polls
programs._LOOKS = 0.0
watch = programs.ProgramWatch(IsolationPlan(Level.OVERLAY, "no launcher").text())
child = os.fork()
if child == 0:
    time.sleep(0.05)  # the kernel's clock of files is coarse
    os.mkfifo("copy")  # as the overlay of an ordinary user does
    time.sleep(0.05)
    watch.hold()
    time.sleep(0.05)
    os.mkfifo("own")
    pipes = Pipes(IsolationPlan.parse(os.environ[VARIABLE]).began)
    print([name for name in ("copy", "own") if pipes.are_others(name)], flush=True)
    open("copy")
watch.begin(child)
watch.answer()
for _ in polls(60.0):
    watch.look(lambda: [child])
    if os.waitpid(child, os.WNOHANG)[0]:
        break
else:
    print("it waits for ever")
    os.kill(child, signal.SIGKILL)
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="open is known on these processors")
def test_a_copy_that_the_overlay_has_made_is_a_pipe_of_others(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", COPIED]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr, done.returncode) == ("['copy']\n", "", 0)


@pytest.mark.parametrize("with_landlock", [False, *([True] if landlock.supported() else [])])
@pytest.mark.parametrize(
    "name",
    [
        "open to write",
        "open to read",
        "whole path",
        "whole path, to read",
        "link in a folder",
        "renamed",
        "a child's Python",
    ],
)
def test_under_guard(name: str, with_landlock: bool, tree: Path, tmp_path: Path) -> None:
    before = snapshot(tree)
    ended, said = run(ENDS[name], tree, tmp_path / "scratch", with_landlock, inject=tmp_path / "inject")
    assert "a named pipe that is older than this run" in said
    assert ended == 77
    assert snapshot(tree) == before


def test_its_own_under_guard(tree: Path, tmp_path: Path) -> None:
    before = snapshot(tree)
    code = "import time; time.sleep(0.05)  # the kernel's clock of files is coarse\n"
    code += "".join(f"exec({case!r})\n" for case in PASSES.values())
    ended, said = run(code, tree, tmp_path / "scratch")
    assert ended == 0, said
    assert snapshot(tree) == before
