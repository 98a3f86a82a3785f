"""What the guard does not cover ends tuning before a real file changes; the reason names the operation and the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from guarded import plant, run, snapshot

from autoddp.isolation.kernel import landlock

STOPPED = {
    "rm": ("import subprocess; subprocess.run(['rm', 'model.pt'])", "rm model.pt"),
    "touch": ("import subprocess; subprocess.run(['touch', 'new'])", "touch new"),
    "chmod": ("import subprocess; subprocess.run(['chmod', '600', 'model.pt'])", "chmod 600 model.pt"),
    "shell": ("os.system('rm -rf ckpt')", "rm -rf ckpt"),
    "redirection": ("import subprocess; subprocess.run('echo x >> log.txt', shell=True)", "echo x >> log.txt"),
    "glob": ("import subprocess; subprocess.run('ls *.pt | xargs rm', shell=True)", "xargs rm"),
    "substitution": ("os.system('echo $(rm model.pt)')", "rm model.pt"),
    "cd": ("os.system('cd ckpt')", "cd ckpt"),
    "pipe": ("os.system('echo x | tee log.txt')", "tee log.txt"),
    "popen": ("os.popen('mv model.pt x').read()", "mv model.pt x"),
    "own script": ("import subprocess; subprocess.run(['./tool.sh'])", "./tool.sh"),
    "shell script": ("import subprocess; subprocess.run(['sh', 'tool.sh'])", "sh tool.sh"),
    "exec": ("os.execv('/bin/rm', ['rm', 'model.pt'])", "rm model.pt"),
    "execlp": ("os.execlp('rm', 'rm', 'model.pt')", "rm model.pt"),
    "fork and exec": ("p = os.fork(); p or os.execlp('rm', 'rm', 'model.pt'); os._exit(os.wait()[1] >> 8)", "rm"),
    "posix_spawn": ("os.posix_spawn('/bin/rm', ['rm', 'model.pt'], os.environ)", "rm model.pt"),
    "posix_spawn that opens": (
        "opens = (os.POSIX_SPAWN_OPEN, 1, 'model.pt', os.O_WRONLY | os.O_TRUNC, 0)\n"
        "os.waitpid(os.posix_spawn('/bin/ls', ['ls'], os.environ, file_actions=[opens]), 0)",
        "os.posix_spawn opens model.pt",
    ),
    "spawn": ("sys.exit(os.spawnlp(os.P_WAIT, 'rm', 'rm', 'model.pt'))", "rm model.pt"),
    "pty": ("import pty; sys.exit(os.waitstatus_to_exitcode(pty.spawn(['rm', 'model.pt'])))", "rm model.pt"),
    "git commit": ("import subprocess; subprocess.run(['git', 'add', 'model.pt'])", "git add"),
    "git output": ("import subprocess; subprocess.run(['git', 'log', '--output=model.pt'])", "--output=model.pt"),
    "python unguarded": ("import subprocess; subprocess.run([sys.executable, '-I', 'x.py'])", "-I x.py"),
    "python without site": ("import subprocess; subprocess.run([sys.executable, '-Sc', '1'])", "-Sc 1"),
    "sorted": ("import subprocess; subprocess.run(['sort', '-o', 'log.txt', 'log.txt'])", "sort -o log.txt"),
    "read of a changed file": (
        "open('log.txt','a').write('x')\nimport subprocess; subprocess.run(['cat', 'log.txt'])",
        "cat",
    ),
    "unlink by ctypes": ("import ctypes; ctypes.CDLL(None).unlink(b'model.pt')", "unlink"),
    "system by ctypes": ("import ctypes; ctypes.CDLL(None).system(b'rm model.pt')", "system"),
    "syscall by ctypes": ("import ctypes; ctypes.CDLL('libc.so.6').syscall(87, b'model.pt')", "syscall"),
    "attach": ("import sqlite3; sqlite3.connect(':memory:').execute(\"ATTACH 'model.pt' AS x\")", "model.pt"),
    "vacuum": ("import sqlite3; sqlite3.connect(':memory:').execute(\"VACUUM INTO 'x.db'\")", "sqlite3 attaches"),
    "chroot": ("os.chroot('ckpt')", "os.chroot"),
    "original open": (
        "import gc\n[f for f in gc.get_objects() if getattr(f, '__name__', '') == 'open' and type(f).__name__ == "
        "'builtin_function_or_method' and f.__module__ in ('io', '_io')][0]('model.pt', 'w')",
        "open changes",
    ),
    "original unlink": ("os.unlink.__wrapped__('model.pt')", "os.remove changes"),
    "original rename": ("os.rename.__wrapped__('model.pt', 'x')", "os.rename changes"),
    "original chmod": ("os.chmod.__wrapped__('model.pt', 0o777)", "os.chmod changes"),
    "original utime by descriptor": ("os.utime.__wrapped__(os.open('model.pt', os.O_RDONLY))", "os.utime changes"),
    "original mkdir by folder": ("os.mkdir.__wrapped__('x', dir_fd=os.open('ckpt', os.O_RDONLY))", "os.mkdir changes"),
    "original link": ("os.link.__wrapped__('model.pt', '/dev/shm/autoddp-x')", "os.link changes"),
    "original truncate": ("os.truncate.__wrapped__('outside/far.txt', 0)", "far.txt"),
    "ioctl": ("import fcntl; fcntl.ioctl(os.open('model.pt', 0), 0x40086602, bytes(8))", "model.pt"),
}
WITHOUT_LANDLOCK = {
    "unknown program": ("import subprocess; subprocess.run(['sort', '--version'])", "no Landlock"),
    "unknown extension": (
        "import importlib.machinery as m, importlib.util as u, _json as j, _posixshmem as p\n"
        "import shutil; shutil.copy(p.__file__, 'writer.so')\n"
        "u.module_from_spec(u.spec_from_file_location('writer', os.path.abspath('writer.so')))",
        "import of writer",
    ),
    "unknown library": ("import ctypes; ctypes.CDLL('libarchive.so.13')", "libarchive"),
}
LEVELS = [False, *([True] if landlock.supported() else [])]


def check(tmp_path: Path, code: str, reason: str, with_landlock: bool) -> None:
    tree = tmp_path / "tree"
    plant(tree)
    before, before_elsewhere = snapshot(tree), snapshot(tmp_path / "elsewhere")
    ended, said = run(code, tree, tmp_path / "scratch", with_landlock)
    assert snapshot(tree) == before
    assert snapshot(tmp_path / "elsewhere") == before_elsewhere
    line = next((line for line in said.splitlines() if line.startswith("STOPPED: ")), "")
    assert reason in line, said
    assert ended == 77


@pytest.mark.parametrize("name", STOPPED)
def test_it_is_stopped(tmp_path: Path, name: str) -> None:
    check(tmp_path, *STOPPED[name], with_landlock=False)


@pytest.mark.parametrize("name", WITHOUT_LANDLOCK)
def test_it_is_stopped_where_no_kernel_watches(tmp_path: Path, name: str) -> None:
    check(tmp_path, *WITHOUT_LANDLOCK[name], with_landlock=False)


ALLOWED = """
import subprocess, ctypes.util
def said(*words, **more):
    return subprocess.run(*words, capture_output=True, text=True, **more)
assert said(["uname", "-a"]).stdout
assert said("uname -a 2>/dev/null | head -1", shell=True).stdout
assert said(["cat", "log.txt"]).stdout == "line 1\\n"
assert said(["git", "--no-pager", "log"]).returncode in (0, 128)
assert said(["git", "status"]).returncode in (0, 128)
os.makedirs("new/folder")
assert said(["pwd"], cwd="new").returncode == 0
assert said(["ls"], cwd="new").stdout == "folder\\n"
remove = "import os; os.remove('model.pt'); print(os.listdir('new'))"
assert said([sys.executable, "-c", remove]).stdout == "['folder']\\n"
assert not os.path.exists("model.pt")
others = os.environ["PYTHONPATH"].split(os.pathsep)[1:]
bare = {"PATH": os.path.dirname(sys.executable), "PYTHONPATH": os.pathsep.join(others)}
assert said([sys.executable, "-c", "open('log.txt', 'a').write('x')"], env=bare).returncode == 0
assert said(["python", "-c", "open('log.txt', 'a').write('y')"], env=bare).returncode == 0
child = os.fork()
if not child:
    os.execve(sys.executable, [sys.executable, "-c", "open('log.txt', 'a').write('z')"], bare)
assert os.waitpid(child, 0)[1] == 0
assert open("log.txt").read() == "line 1\\nxyz"
open("script.py", "w").write("print(open('new/x', 'w').write('abc'))")
assert said([sys.executable, "script.py"]).stdout == "3\\n"
assert open("new/x").read() == "abc"
ctypes.util.find_library("c"), ctypes.util.find_library("no-such-library")
"""


@pytest.mark.parametrize("with_landlock", LEVELS)
def test_programs_that_only_read_are_started(tmp_path: Path, with_landlock: bool) -> None:
    tree = tmp_path / "tree"
    plant(tree)
    before = snapshot(tree)
    ended, said = run(ALLOWED, tree, tmp_path / "scratch", with_landlock, inject=tmp_path / "inject")
    assert snapshot(tree) == before
    assert ended == 0, said


@pytest.mark.skipif(not landlock.supported(), reason="this kernel has no Landlock")
@pytest.mark.parametrize("name", ["shell", "chmod", "original rename", "exec", "unlink by ctypes"])
def test_it_is_stopped_with_landlock_too(tmp_path: Path, name: str) -> None:
    check(tmp_path, *STOPPED[name], with_landlock=True)


UNCAUGHT = """
import errno, mmap
from guarded import stop
from autoddp.worker.process.isolated import _at_the_end_of, _is_refusal
_at_the_end_of(_is_refusal, stop, "the kernel refused")
def change():
    mmap.mmap(os.open("model.pt", os.O_RDONLY), 1).write(b"x")
"""
CHANGES = """
try:
    change()
except OSError as error:
    raise RuntimeError(f"cannot save: {error}") from error
"""
LIBRARY = "raise OSError(errno.EACCES, \"cannot create file (errno = 13, error message = 'Permission denied')\")"
CATCHES = f"""
try:
    {LIBRARY}
except OSError as error:
    print(error)
    sys.exit({{}})
"""
ENDS = {
    # what the script does: its code, and its exit code
    "may not write": ("change()", 1),
    "may not write, in words of its own": (CHANGES, 1),
    "a library": (LIBRARY, 77),
    "a library, in the system's words": ("raise PermissionError(errno.EACCES, 'Permission denied', 'new.nc')", 77),
    "a library, caught before the end": (CATCHES.format("1"), 77),
    "a library, caught before a good end": (CATCHES.format("0"), 0),
    "a library, before a hook of the script's own": (f"sys.excepthook = lambda *error: print(error)\n{LIBRARY}", 77),
    "in a folder": ("open('locked/x', 'w')", 1),
}


@pytest.mark.parametrize("name", [name for name in ENDS if name != "in a folder" or os.geteuid()])  # root may anywhere
def test_what_the_user_may_not_write_is_no_fault_of_the_isolation(tmp_path: Path, name: str) -> None:
    tree, (code, ends) = tmp_path / "tree", ENDS[name]
    plant(tree)
    (tree / "locked").mkdir(0o555)
    ended, said = run(UNCAUGHT + code, tree, tmp_path / "scratch")
    assert (ended, "Permission denied" in said) == (ends, True), said
