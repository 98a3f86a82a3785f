"""All processes below one are found and ended, also where /proc does not show everything."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
from launchers import ROOT
from traces.room import may_bind

from autoddp.processes import children

ENDS = """
import os, subprocess, sys, time
from autoddp.isolation.kernel.syscalls import adopt_orphans
from autoddp.processes import children

if sys.argv[1] == "user":  # only now, because another user may not be able to read Python's files
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
adopt_orphans()
shell = subprocess.Popen(["sh", "-c", "sleep 100 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
sleeping = int(shell.stdout.readline())
while f"sleep ({sleeping})" not in children.named_descendants(None):  # the shell's child may yet have its name
    time.sleep(0.01)
children.kill_if_below(shell.pid)
assert shell.wait(60) == -9
children.kill_descendants()
assert not os.path.exists(f"/proc/{sleeping}")
"""


@pytest.mark.skipif(not may_bind(), reason="needs root, to mount /proc again")
@pytest.mark.parametrize(
    ("options", "user"),
    [
        ("hidepid=1", "user"),  # as on hosts that many users share
        ("subset=pid", "root"),  # as in a service of systemd with ProcSubset=pid
    ],
)
def test_where_proc_hides_something_nothing_is_left(options: str, user: str) -> None:
    # In a PID namespace too: before Linux 5.8 such options are those of the whole namespace.
    room = ["unshare", "-m", "-p", "-f", "--kill-child", "--propagation", "private", "sh", "-c"]
    mounts = f'mount -t proc -o {options} proc /proc || exit 77; "$@"; exit $?'
    words = [*room, mounts, "sh", sys.executable, "-c", ENDS, user]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    if run.returncode == 77:
        pytest.skip("needs Linux 5.8")
    assert run.returncode == 0, run.stderr


def test_a_process_that_ends_while_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a job its helpers end by themselves, also between two looks at one of them."""
    own = psutil.Process()
    with subprocess.Popen(["true"]) as ended:
        ends = psutil.Process(ended.pid)
    monkeypatch.setattr(children, "_running", lambda: iter([ends, own]))
    assert children.named_descendants(None) == f"{own.name()} ({own.pid})"
