"""The oracle finds what planted programs do, and leaves out what they do in another mount namespace."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from traces.oracle import judge, unique, watch
from traces.room import may_bind

pytestmark = pytest.mark.skipif(
    shutil.which("strace") is None or subprocess.run(["strace", "-qq", "true"], capture_output=True).returncode != 0,
    reason="needs strace, and the right to use it",
)
needs_mounts = pytest.mark.skipif(not may_bind(), reason="needs the right to make a mount namespace")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "user.txt").write_text("the user's\n")
    (folder / "other.txt").write_text("the user's\n")
    return folder


def found(outside: Path, code: str, *, shell: bool = False) -> set[tuple[str, str]]:
    """The calls and names that a program in Python, or a shell's command, is caught with; it may write in `allowed`."""
    allowed = outside.parent / "allowed"
    allowed.mkdir(exist_ok=True)
    command = ["bash", "-c", code] if shell else [sys.executable, "-I", "-S", "-c", f"import os\n{code}"]
    watched = watch(command, [allowed], outside)
    assert watched.returncode == 0, watched.output
    return {(one.call, Path(one.path).name) for one in unique(watched.findings)}


def test_nothing_is_found_where_nothing_is_written(outside: Path) -> None:
    code = "open('user.txt').read(); open('/dev/null', 'w'); open('../allowed/x', 'w'); os.listdir('.')"
    assert found(outside, code) == set()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("open('user.txt', 'w')", {("openat", "user.txt")}),
        ("open('user.txt', 'r+')", {("openat", "user.txt")}),
        ("os.close(os.open('user.txt', os.O_RDONLY | os.O_TRUNC))", {("openat", "user.txt")}),
        ("os.unlink('user.txt')", {("unlink", "user.txt")}),
        ("os.rename('user.txt', 'b')", {("rename", "user.txt"), ("rename", "b")}),
        ("os.rename('user.txt', '../allowed/b')", {("rename", "user.txt")}),
        ("os.truncate('user.txt', 1)", {("truncate", "user.txt")}),
        ("os.chmod('user.txt', 0o600)", {("chmod", "user.txt")}),
        ("os.chown('user.txt', -1, -1)", {("chown", "user.txt")}),
        ("os.utime('user.txt')", {("utimensat", "user.txt")}),
        ("os.mkdir('d'); os.rmdir('d')", {("mkdir", "d"), ("rmdir", "d")}),
        ("os.symlink('user.txt', 's')", {("symlink", "s")}),
        ("os.link('user.txt', 'h')", {("link", "h")}),
        ("os.mkfifo('p')", {("mknod", "p")}),
        ("os.setxattr('user.txt', 'user.a', b'x')", {("setxattr", "user.txt")}),
        ("open('with, comma) = \"x\" <y>\\n', 'w')", {("openat", 'with, comma) = "x" <y>\n')}),
    ],
)
def test_each_kind_of_change(outside: Path, code: str, expected: set[tuple[str, str]]) -> None:
    names = {"mkfifo": "mknodat", "mknod": "mknodat", "unlink": "unlinkat"}  # what another libc calls instead
    others = {(names.get(call, call), name) for call, name in expected}
    assert found(outside, code) in (expected, others)


def test_what_fails_does_not_count(outside: Path) -> None:
    code = """
for attempt in (lambda: os.unlink('absent'), lambda: os.mkdir('/proc'), lambda: os.rmdir('.')):
    try: attempt()
    except OSError: pass
"""
    assert found(outside, code) == set()


def test_relative_paths_follow_the_current_folder(outside: Path) -> None:
    code = """
os.chdir('../allowed'); os.mkdir('fine'); os.chdir('../outside')
handle = os.open('../allowed', os.O_RDONLY); os.fchdir(handle)
os.mkdir('also_fine'); os.rename('also_fine', '../outside/bad')
"""
    assert found(outside, code) == {("rename", "bad")}


def test_paths_relative_to_a_folder_handle(outside: Path) -> None:
    code = """
here, there = os.open('.', os.O_RDONLY), os.open('../allowed', os.O_RDONLY)
os.chdir('../allowed')
os.close(os.open('fine', os.O_CREAT | os.O_WRONLY, dir_fd=there))
os.unlink('user.txt', dir_fd=here)
os.rename('fine', 'bad', src_dir_fd=there, dst_dir_fd=here)
os.mkdir('made', dir_fd=here)
"""
    assert found(outside, code) == {("unlinkat", "user.txt"), ("renameat", "bad"), ("mkdirat", "made")}


def test_changes_through_an_open_file(outside: Path) -> None:
    code = """
handle = os.open('user.txt', os.O_RDONLY); os.fchmod(handle, 0o600); os.utime(handle)
os.fchown(handle, -1, -1); os.setxattr(handle, 'user.b', b'x')
"""
    calls = {call for call, name in found(outside, code) if name == "user.txt"}
    assert calls == {"fchmod", "utimensat", "fchown", "fsetxattr"}


def test_a_link_stands_for_its_target_where_the_call_follows_it(outside: Path) -> None:
    (outside.parent / "allowed").mkdir()
    (outside.parent / "allowed" / "link").symlink_to(outside / "user.txt")
    (outside.parent / "allowed" / "folder").symlink_to(outside)
    code = """
os.chdir('../allowed'); os.chmod('link', 0o600); open('link', 'a'); os.unlink('folder/other.txt')
"""
    assert found(outside, code) == {("chmod", "user.txt"), ("openat", "user.txt"), ("unlink", "other.txt")}


@pytest.mark.parametrize(
    "code",
    [
        "rm user.txt",
        "(sleep 0.1; rm user.txt) & wait",
        "cd ../allowed; setsid sh -c 'cd ../outside; rm user.txt' & wait",
        'cd / && find "$OLDPWD" -name user.txt -delete',
    ],
)
def test_children_count(outside: Path, code: str) -> None:
    calls = found(outside, code, shell=True)
    assert {name for call, name in calls if call.startswith("unlink")} == {"user.txt"}


def test_a_thread_shares_the_current_folder(outside: Path) -> None:
    code = """
import sys; sys.path[:] = sys.path
from _thread import start_new_thread, allocate_lock
done = allocate_lock(); done.acquire()
def work(): os.chdir('../allowed'); done.release()
start_new_thread(work, ()); done.acquire()
os.mkdir('fine'); os.mkdir('../outside/bad')
"""
    assert found(outside, code) == {("mkdir", "bad")}


def test_a_socket_with_a_name(outside: Path) -> None:
    code = "from socket import *; socket(AF_UNIX).bind('sock'); socket(AF_UNIX).bind('\\0abstract')"
    watched = watch([sys.executable, "-c", code], [], outside)
    assert [(one.call, Path(one.path).name) for one in watched.findings] == [("bind", "sock")]


@needs_mounts
def test_another_mount_namespace_does_not_count(outside: Path) -> None:
    inside = "unshare -m sh -c 'rm user.txt; (mkdir made); cd made; touch deep'"
    assert found(outside, inside, shell=True) == set()
    outside_too = found(outside, "unshare -m touch new; rm other.txt", shell=True)
    assert {name for _, name in outside_too} == {"other.txt"}


@needs_mounts
def test_another_kind_of_namespace_counts(outside: Path) -> None:
    assert {name for _, name in found(outside, "unshare -u rm user.txt", shell=True)} == {"user.txt"}
    pids = found(outside, "unshare --pid --fork sh -c 'rm other.txt; true'", shell=True)
    assert {name for _, name in pids} == {"other.txt"}


def test_a_child_whose_lines_come_before_its_parents_call_has_ended() -> None:
    lines = """1 chdir("/tmp") = 0
1 clone(child_stack=NULL, flags=CLONE_NEWNS|SIGCHLD <unfinished ...>
2 unlink("/home/elsewhere") = 0
1 <... clone resumed>) = 2
1 clone(child_stack=NULL, flags=SIGCHLD <unfinished ...>
3 unlink("relative" <unfinished ...>
1 <... clone resumed>) = 3
3 <... unlink resumed>) = 0
4 unlink("/home/of an unknown parent") = 0
4 unlink("/home/never ended" <unfinished ...>
4 +++ killed by SIGKILL +++""".splitlines()
    findings, processes, elsewhere = judge(lines, [], "/")
    assert [(one.pid, one.path) for one in findings] == [(3, "/tmp/relative"), (4, "/home/of an unknown parent")]
    assert (processes, elsewhere) == (4, 1)
