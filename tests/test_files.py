"""Files are written whole or not at all."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from autoddp.files import write_whole


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
