"""Once writes are restricted, the kernel refuses them outside the folders given, also to children; all else works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from guarded import ROOT, snapshot

from autoddp.isolation.kernel import landlock

PROGRAM = """
import os, socket, subprocess, sys
from autoddp.isolation.kernel.landlock import restrict_writes, supported
allowed, real = sys.argv[1:]
kept = open(f"{real}/kept.txt", "a")
assert supported()
restrict_writes([allowed, "/dev", "/no/such/folder", f"{real}/single.txt"])

def refused(action):
    try:
        action()
    except OSError as error:
        return error.errno in (1, 13, 18)
    return False

os.chdir(real)
os.mkdir(f"{allowed}/a"); os.mkdir(f"{allowed}/b")
open(f"{allowed}/a/x", "w").write("x")
os.rename(f"{allowed}/a/x", f"{allowed}/b/x")
os.link(f"{allowed}/b/x", f"{allowed}/a/x")
os.symlink("x", f"{allowed}/l")
os.truncate(f"{allowed}/b/x", 0)
kept.write("more"); kept.close()
open("single.txt", "w").write("allowed")
assert open("file.txt").read() == "mine"
actions = [
    lambda: open("file.txt", "w"), lambda: open("file.txt", "r+"), lambda: open("new", "w"),
    lambda: os.unlink("file.txt"), lambda: os.mkdir("new"), lambda: os.rmdir("folder"),
    lambda: os.rename("file.txt", "new"), lambda: os.rename("file.txt", f"{allowed}/x"),
    lambda: os.rename(f"{allowed}/b/x", "x"), lambda: os.link("file.txt", f"{allowed}/hard"),
    lambda: os.symlink("x", "new"), lambda: os.truncate("file.txt", 0), lambda: os.mkfifo("new"),
]
assert [refused(action) for action in actions] == [True] * len(actions), [refused(action) for action in actions]
assert subprocess.run(["rm", "file.txt"], capture_output=True).returncode
assert subprocess.run("echo x > file.txt", shell=True, capture_output=True).returncode
open("/dev/null", "w").write("x")
subprocess.run(["true"], stdout=subprocess.DEVNULL, check=True)
pair = socket.socketpair(); pair[0].send(b"x"); assert pair[1].recv(1) == b"x"
server = socket.socket(socket.AF_UNIX); server.bind(f"{allowed}/s"); server.listen()
socket.socket(socket.AF_UNIX).connect(f"{allowed}/s")
print("well")
"""


@pytest.mark.skipif(not landlock.supported(), reason="this kernel has no Landlock")
def test_writes_elsewhere_are_refused(tmp_path: Path) -> None:
    real, allowed = tmp_path / "real", tmp_path / "allowed"
    (real / "folder").mkdir(parents=True)
    allowed.mkdir()
    for name in ("file.txt", "kept.txt", "single.txt"):
        (real / name).write_text("mine")
    before = snapshot(real)
    words = [sys.executable, "-c", PROGRAM, str(allowed), str(real)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "well\n", done.stderr
    assert (real / "kept.txt").read_text() == "minemore"
    changed = {name for name, now in snapshot(real).items() if now != before[name]}
    assert changed == {"kept.txt", "single.txt"}


def test_asking_changes_nothing(tmp_path: Path) -> None:
    landlock.supported()
    (tmp_path / "x").write_text("still allowed")


def test_a_kernel_without_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock.platform, "machine", lambda: "pdp11")
    assert not landlock.supported()
    with pytest.raises(OSError, match="Landlock"):
        landlock.restrict_writes(["/dev"])
