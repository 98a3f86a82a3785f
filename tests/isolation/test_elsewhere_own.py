"""Which processes count as the attempt's, also on hosts whose /proc hides those of other users."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launchers import ROOT
from traces.room import may_bind

LOOKS = """
import os, time
from autoddp.isolation.elsewhere.own import is_below

def of_a_user(does):
    child = os.fork()
    if child:
        return child
    try:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        does()
        os._exit(0)
    finally:
        os._exit(1)

def looks():
    ended = os.fork()
    if not ended:
        os._exit(0)
    os.waitpid(ended, 0)
    assert is_below(ended, os.getpid())
    assert is_below(os.getpid(), os.getpid())
    assert not is_below(other, os.getpid())

other = of_a_user(lambda: time.sleep(100))  # as this one, it was started by a process of root's, such as sshd
while os.stat(f"/proc/{other}").st_uid == 0:
    time.sleep(0.01)
assert os.waitpid(of_a_user(looks), 0)[1] == 0
"""


@pytest.mark.skipif(not may_bind(), reason="needs root, to mount /proc again")
@pytest.mark.parametrize("hides", [0, 1, 2])
def test_another_process_of_the_user_is_none_of_the_attempt(hides: int) -> None:
    # In a PID namespace too: before Linux 5.8 the option is that of the whole namespace.
    room = ["unshare", "-m", "-p", "-f", "--kill-child", "--propagation", "private", "sh", "-c"]
    mounts = f'mount -t proc -o hidepid={hides} proc /proc && "$@"; exit $?'
    words = [*room, mounts, "sh", sys.executable, "-c", LOOKS]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


KEEPS = """
import os, socket, sys
from autoddp.isolation.elsewhere import own
os.chdir(sys.argv[1])
launcher, another = (socket.socket(socket.AF_UNIX) for _ in range(2))
for end, name in ((launcher, "s"), (another, "t")):
    end.bind(os.path.abspath(name))
    end.listen()
if not os.fork():
    launcher.close()
    another.close()
    own.count_below(os.getpid(), os.path.abspath("s"))
    os._exit(0 if own.serves_path(os.path.abspath("s")) and not own.serves_path(os.path.abspath("t")) else 1)
assert os.wait()[1] == 0
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's lists of sockets")
def test_the_launchers_socket_is_none_of_others(tmp_path: Path) -> None:
    words = [sys.executable, "-c", KEEPS, str(tmp_path)]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
