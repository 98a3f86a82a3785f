"""Files are written whole or not at all, and read up to a limit."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from autoddp.files import read_at_most, write_whole


@pytest.mark.parametrize("content", ["Übermut\n", "Übermut\n".encode()])
def test_text_and_bytes(tmp_path: Path, content: str | bytes) -> None:
    place = tmp_path / "a"
    write_whole(place, "x" * 100)
    write_whole(place, content)
    assert place.read_bytes() == "Übermut\n".encode()
    assert os.listdir(tmp_path) == ["a"]


def test_the_mode_is_the_umasks(tmp_path: Path) -> None:
    place = tmp_path / "a"
    old = os.umask(0o027)
    try:
        write_whole(place, "")
    finally:
        os.umask(old)
    assert stat.S_IMODE(place.stat().st_mode) == 0o640


def test_a_disk_that_is_full_leaves_the_old_file(tmp_path: Path) -> None:
    """A limit on the size of files stops the write half-way, as a full disk does."""
    place = tmp_path / "a"
    write_whole(place, "old")
    program = f"""
import resource, signal
from pathlib import Path
from autoddp.files import write_whole
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    write_whole(Path({str(place)!r}), "x" * 100_000)
except OSError as error:
    print(error.errno)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "27", done.stderr  # EFBIG
    assert place.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each file has a name")
def test_one_that_is_killed_while_the_disk_is_slow_leaves_nothing(tmp_path: Path) -> None:
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_WRONLY))
    except OSError:
        pytest.skip("this file system has no files without a name")
    place = tmp_path / "a"
    write_whole(place, "old")
    program = f"""
import os, signal
from pathlib import Path
from autoddp.files import write_whole
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
write_whole(Path({str(place)!r}), "new")
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    assert place.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each file has a name")
def test_a_file_system_without_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.O_TMPFILE", os.O_DIRECTORY)  # the answer of such a one: it is a folder
    test_text_and_bytes(tmp_path, "Übermut\n")


def test_a_reader_never_finds_half(tmp_path: Path) -> None:
    place = tmp_path / "a"
    sizes = (1, 3_000_000)
    write_whole(place, "x")
    found = set()
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            found.add(len(place.read_bytes()))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(10):
        for size in sizes:
            write_whole(place, b"x" * size)
    over.set()
    reader.join()
    assert found <= set(sizes)


def test_no_more_is_read_than_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    assert read_at_most(tmp_path / "a", 4) == b"0123"
    assert read_at_most(tmp_path / "a", 20) == b"0123456789"
    assert read_at_most(Path("/dev/zero"), 3) == b"\0\0\0"


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    """As a shell's `<(command)`, whose command may take its time. A named pipe without a writer is empty."""
    os.mkfifo(tmp_path / "pipe")
    assert read_at_most(tmp_path / "pipe", 100) == b""
    with subprocess.Popen(["sh", "-c", "echo first; sleep 0.2; echo last"], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert read_at_most(Path(f"/dev/fd/{writer.stdout.fileno()}"), 100) == b"first\nlast\n"
