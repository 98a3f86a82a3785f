"""Under guard: shared memory of other programs stays as it is, and the script's own is used and removed as usual."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from guarded import finished, run

from autoddp.attempts import keeper
from autoddp.isolation import Level
from autoddp.isolation.kernel import landlock
from autoddp.isolation.plan import SHARED_MEMORY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /dev/shm")

USES = "from multiprocessing.shared_memory import SharedMemory\n"
STOPPED = {
    "removed and made again": (
        "try: s = SharedMemory(name); s.close(); s.unlink()\n"
        "except FileNotFoundError: pass\n"
        "s = SharedMemory(name, create=True, size=100)",
        "opens to write shared memory of another program",
    ),
    "written": ("SharedMemory(name).buf[:] = bytes(100)", "opens to write shared memory of another program"),
    "removed by the function in C": (
        "import _posixshmem; _posixshmem.shm_unlink('/' + name)",
        "removes shared memory of another program",
    ),
    "cut by the function in C": (
        "import _posixshmem; _posixshmem.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode=0o600)",
        "opens to write shared memory of another program",
    ),
    "removed as a file": (
        "os.unlink('/dev/shm/' + name); SharedMemory(name, create=True, size=100)",
        "both as a file and as shared memory",
    ),
    "removed by the original function": ("os.unlink.__wrapped__('/dev/shm/' + name)", "os.remove changes /dev/shm/"),
    "by ctypes": ("import ctypes; ctypes.CDLL(None).shm_open(name.encode(), 0, 0)", "ctypes calls shm_open"),
    "System V's by ctypes": ("import ctypes; ctypes.CDLL(None).shmctl(0, 0, None)", "ctypes calls shmctl"),
}
LEVELS = [False, *([True] if landlock.supported() else [])]


@pytest.fixture
def segment() -> Iterator[SharedMemory]:
    """What another program shares with its clients."""
    made = SharedMemory(f"autoddp-test-{os.getpid()}", create=True, size=100)
    made.buf[:6] = b"user's"
    yield made
    made.close()
    with_name = Path("/dev/shm", made.name)
    if with_name.exists():
        made.unlink()
    else:
        resource_tracker.unregister("/" + made.name, "shared_memory")


@pytest.mark.parametrize("with_landlock", LEVELS)
@pytest.mark.parametrize("name", STOPPED)
def test_what_another_program_shares_ends_tuning(
    segment: SharedMemory, tmp_path: Path, name: str, with_landlock: bool
) -> None:
    code, reason = STOPPED[name]
    before = os.stat(f"/dev/shm/{segment.name}").st_ino
    ended, said = run(f"{USES}name = {segment.name!r}\n{code}", tmp_path, tmp_path / "scratch", with_landlock)
    assert reason in said
    assert ended == 77
    assert os.stat(f"/dev/shm/{segment.name}").st_ino == before
    assert bytes(segment.buf[:6]) == b"user's"


OWN = '''
import multiprocessing, subprocess, _posixshmem
from multiprocessing import resource_tracker

def fails(kind, *arguments, **more):
    try: SharedMemory(*arguments, **more)
    except kind: return True

assert fails(FileExistsError, theirs, create=True, size=1)
assert fails(FileNotFoundError, mine)
assert os.read(_posixshmem.shm_open(theirs, os.O_RDONLY, mode=0), 6) == b"user's"
resource_tracker.register("/" + theirs, "shared_memory")  # as Python does up to 3.12 for whoever attaches

memory = SharedMemory(mine, create=True, size=100)
memory.buf[0] = 7
other = f"""
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory({mine!r})
resource_tracker.unregister("/" + memory.name, "shared_memory")  # or its own tracker removes it, up to Python 3.12
memory.buf[1] = memory.buf[0] + 1
"""
subprocess.run([sys.executable, "-c", other], check=True)
assert memory.buf[1] == 8
memory.close()
memory = SharedMemory(mine, create=not os.path.exists("/dev/shm/" + mine), size=100)
memory.unlink()
memory = SharedMemory(mine, create=True, size=100)
SharedMemory(create=True, size=1).unlink()
lock = multiprocessing.get_context("spawn").Lock()
made = {name for name in os.listdir("/dev/shm") if os.stat("/dev/shm/" + name).st_ino in listed()}
print("made:", *sorted(made))
resource_tracker.unregister("/" + mine, "shared_memory")
'''


def test_the_scripts_own_is_used_and_removed(segment: SharedMemory, tmp_path: Path) -> None:
    mine, taken = f"{segment.name}-mine", f"{segment.name}-taken"
    listed = tmp_path / "scratch" / SHARED_MEMORY
    start = (
        f"{USES}theirs, mine = {segment.name!r}, {mine!r}\n"
        f"def listed(): return [int(line.split()[0]) for line in open({str(listed)!r})]\n"
    )
    ended, said = run(start + OWN, tmp_path, tmp_path / "scratch", inject=tmp_path / "inject")
    assert ended == 0, said
    assert os.path.exists(f"/dev/shm/{segment.name}"), said
    (made,) = (line.split()[1:] for line in said.splitlines() if line.startswith("made: "))
    assert made[0] == mine
    assert made[1].startswith("sem.mp-")
    left = Path("/dev/shm", mine)
    assert left.exists()

    with listed.open("a") as file:  # a name that another program has taken after the script had removed its own
        Path("/dev/shm", taken).touch()
        file.write(f"{left.stat().st_ino} {taken}\n")
    try:
        keeper._clean_up_after(keeper.Shelter(Level.GUARD, shared_memory=str(listed)))
        assert Path("/dev/shm", taken).exists()
        assert not left.exists()
        assert os.path.exists(f"/dev/shm/{segment.name}")
    finally:
        Path("/dev/shm", taken).unlink()


def test_what_a_killed_script_leaves_is_listed(tmp_path: Path) -> None:
    code = (
        "import multiprocessing, os, signal\n"
        f"{USES}lock = multiprocessing.get_context('spawn').Lock()\n"
        "memory = SharedMemory(create=True, size=1)\n"
        "print(memory.name, lock._semlock.name, multiprocessing.resource_tracker._resource_tracker._pid, flush=True)\n"
        "os.kill(multiprocessing.resource_tracker._resource_tracker._pid, signal.SIGKILL)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process: subprocess.Popen[str] = run(code, tmp_path, tmp_path / "scratch", inject=tmp_path / "inject", wait=False)
    _, said = finished(process)
    memory, lock = said.split()[:2]
    places = [Path("/dev/shm", memory), Path("/dev/shm", f"sem.{lock.lstrip('/')}")]
    assert all(place.exists() for place in places), said
    keeper._clean_up_after(keeper.Shelter(Level.GUARD, shared_memory=str(tmp_path / "scratch" / SHARED_MEMORY)))
    assert not any(place.exists() for place in places)
