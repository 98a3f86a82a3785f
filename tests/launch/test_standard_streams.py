"""The terminal and the standard descriptors are put back as they were; another job's terminal is left alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoddp.isolation import Level
from autoddp.isolation.children import INJECT, VARIABLE
from autoddp.isolation.plan import IsolationPlan

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import fcntl, os, signal, sys, termios, tty
from autoddp.processes.standard_streams import StandardStreams

def settings():
    return [termios.tcgetattr(0), fcntl.fcntl(0, fcntl.F_GETFL), fcntl.fcntl(1, fcntl.F_GETFL)]
if "shell" in sys.argv:  # the terminal belongs to this session, whose shell this process is
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
command = os.fork()
if command:
    os.waitpid(command, 0)
    os._exit(0)
if "shell" in sys.argv:
    os.setpgid(0, 0)
if "foreground" in sys.argv:
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.tcsetpgrp(0, os.getpgrp())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
if "own session" in sys.argv:  # as the launcher's under --no-orphans
    launcher = os.fork()
    if launcher:
        os.waitpid(launcher, 0)
        os._exit(0)
    os.setsid()
keeper = os.fork()
if keeper:
    os.waitpid(keeper, 0)
    os._exit(0)
os.setpgid(0, 0)
before = settings()
terminal = StandardStreams()
script = os.fork()
if script == 0:
    os.setsid()
    tty.setcbreak(0)
    for number in (0, 1):
        fcntl.fcntl(number, fcntl.F_SETFL, fcntl.fcntl(number, fcntl.F_GETFL) | os.O_NONBLOCK)
    os._exit(0)
os.waitpid(script, 0)
assert settings() != before
terminal.restore()
found = [now == then for now, then in zip(settings(), before)]
os.write(2, repr(found).encode())
"""


@pytest.mark.parametrize(
    ("words", "is_restored"),
    [
        ([], True),  # a terminal without a shell, as of a container
        (["shell", "foreground"], True),
        (["shell", "foreground", "own session"], True),
        (["shell"], False),  # started with &: the terminal is the shell's
        (["shell", "own session"], False),
    ],
    ids=str,
)
def test_it_is_as_before(words: list[str], is_restored: bool) -> None:
    ends, (reader, writer) = pty.openpty(), os.pipe()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-c", PROGRAM, *words]
    done = subprocess.run(
        program, stdin=ends[1], stdout=writer, stderr=subprocess.PIPE, env=env, text=True, timeout=60, check=False,
        start_new_session=True,
    )  # fmt: skip
    for number in (*ends, reader, writer):
        os.close(number)
    assert done.stderr == repr([is_restored, True, True])


SILENT = """
import os, select, subprocess, sys, termios
from autoddp.processes.standard_streams import silent_terminal

before = termios.tcgetattr(0)
users = os.dup(0)
silent = silent_terminal()
os.dup2(silent, 0)
os.close(silent)
print(subprocess.run(["stty", "size"], capture_output=True, text=True).stdout.split(), os.isatty(0))
print(select.select([0], [], [], 0)[0], repr(sys.stdin.read()), os.read(0, 1), termios.tcgetattr(0)[3] & termios.ECHO)
print(termios.tcgetattr(users) == before, os.ttyname(users) != os.ttyname(0))
try:
    os.write(0, bytes(100_000))
except OSError:
    print("not written")
"""


@contextlib.contextmanager
def open_terminal(lines: int, columns: int) -> Iterator[int]:
    """A terminal of that size."""
    ends = pty.openpty()
    fcntl.ioctl(ends[1], termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))
    try:
        yield ends[1]
    finally:
        for end in ends:
            os.close(end)


def test_a_terminal_on_which_nobody_types() -> None:
    with open_terminal(50, 132) as terminal:
        words, env = [sys.executable, "-c", SILENT], {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(words, stdin=terminal, capture_output=True, env=env, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "['50', '132'] True", f"[] '' b'' {termios.ECHO}", "True True", "not written",
    ], done.stderr  # fmt: skip


ASKS = """
import os, shutil
print(*os.get_terminal_size(), *os.get_terminal_size(2), *shutil.get_terminal_size())
with open(os.devnull) as nowhere:
    try:
        os.get_terminal_size(nowhere.fileno())
    except OSError:
        print("none")
"""


def test_the_size_of_the_terminal_is_told_where_output_goes_to_a_log() -> None:
    with open_terminal(30, 101) as terminal:
        env = {**os.environ, "PYTHONPATH": INJECT, VARIABLE: IsolationPlan(Level.OFF, "/nowhere/s").text()}
        for name in ("COLUMNS", "LINES"):
            env.pop(name, None)
        words = [sys.executable, "-c", ASKS]
        done = subprocess.run(words, stdin=terminal, capture_output=True, env=env, text=True, timeout=60)
    assert done.stdout == "101 30 101 30 101 30\nnone\n", done.stderr
