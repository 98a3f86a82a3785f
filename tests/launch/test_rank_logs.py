"""Logs stay small while a rank writes them, and keep their first and last lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launchers import whole

from autoddp.runs import rank_logs
from autoddp.runs.rank_logs import LogKeeper
from autoddp.units import MIB, data_size

SIZES = ("LIMIT", "HEAD", "TAIL", "_COPIED", "_MEANWHILE", "_COPY_AT_MOST", "_BLOCK", "_SPARE")
PART = 16
"""All sizes are this part of the real ones here. A writer is that much slower, too: it outruns as much as it would."""
REAL = {name: getattr(rank_logs, name) for name in SIZES}
UNIT = MIB // PART
LIMIT, HEAD, TAIL = 64 * UNIT, 32 * UNIT, 31 * UNIT
LINE = re.compile(rb"\n\[autoddp: [0-9.]+ [KMG]iB left out here\]\n")
WRITER = f"""
import os, sys, time
for number in range(int(sys.argv[1])):
    text = b"".join(b"%06d %056d\\n" % (number, line) for line in range(256)) * {64 // PART}  # a unit
    while text:
        text = text[os.write(1, text):]
    time.sleep(float(sys.argv[2]))
"""


def content(begin: int, end: int) -> bytes:
    """What WRITER writes from one place to another."""
    first, last = begin // UNIT, -(-end // UNIT)
    lines = [b"".join(b"%06d %056d\n" % (number, line) for line in range(256)) for number in range(first, last)]
    return b"".join(text * (64 // PART) for text in lines)[begin - first * UNIT : end - first * UNIT]


@pytest.fixture(autouse=True)
def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in REAL.items():
        monkeypatch.setattr(rank_logs, name, size // PART)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A rank's, where elastic puts it."""
    folder = tmp_path / "1f2e.tune0_x7k2" / "attempt_0" / "3"
    folder.mkdir(parents=True)
    return folder / "stdout.log"


@pytest.fixture(params=["holes", "no holes"])
def holes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the file system has them."""
    if request.param == "no holes":
        monkeypatch.setattr(rank_logs, "_fallocate", None)
    elif sys.platform != "linux":
        pytest.skip("only Linux has them")
    return bool(request.param == "holes")


def on_disk(folder: Path) -> int:
    """Bytes of all files, by blocks."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def written(log: Path, units: int, pause: float = 0.0, mode: str = "w") -> subprocess.Popen[bytes]:
    """A process that writes `units` units to the log, which it got as an open file, as elastic gives it."""
    with open(log, mode) as file:
        return subprocess.Popen([sys.executable, "-c", WRITER, str(units), str(pause)], stdout=file)


def watched(folder: Path, process: subprocess.Popen[bytes]) -> list[int]:
    """How much was on the disk while it wrote."""
    found = []
    while process.poll() is None:
        found.append(on_disk(folder))
        time.sleep(0.01)
    assert process.returncode == 0
    return found


def check(log: Path, size: int, tail_at_least: int) -> None:
    """That a settled log has head, line and tail, and says how much is left out."""
    text = log.read_bytes()
    assert len(text) <= LIMIT
    assert log.stat().st_blocks * 512 <= LIMIT + MIB
    assert text[:HEAD] == content(0, HEAD)
    left_out = LINE.findall(text)
    nothing, *tail = LINE.split(text[HEAD:])
    assert nothing == b""
    assert sum(len(part) for part in tail) >= tail_at_least
    assert tail[-1] == content(size - len(tail[-1]), size)
    if len(tail) == 1:
        assert data_size(size - HEAD - len(tail[0])).encode() in left_out[0]
    else:  # without holes: what was written while the log was cut is left out too, and what outran the copy
        assert len(tail) <= 3
        for part in tail[:-1]:
            begin = int(part.partition(b"\n")[2][:6]) * UNIT
            assert part in content(begin - UNIT, begin + 40 * UNIT)


def test_the_real_sizes(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in REAL.items():
        monkeypatch.setattr(rank_logs, name, size)
    log.write_text("begins\n")
    os.truncate(log, 100 * MIB)
    with open(log, "a") as file:
        file.write("ends\n")
    LogKeeper(tmp_path).settle()
    text = log.read_bytes()
    assert 63 * MIB < len(text) <= 64 * MIB
    assert text.startswith(b"begins\n")
    assert b"\n[autoddp: 37.0 MiB left out here]\n" in text
    assert text.endswith(b"ends\n")


@pytest.mark.parametrize("holes", ["holes", whole("no holes")], indirect=True)  # a slower writer has both, below
def test_a_fast_writer(log: Path, tmp_path: Path, holes: bool) -> None:
    size = 1500 * UNIT
    with LogKeeper(tmp_path) as keeper:
        found = watched(tmp_path, written(log, size // UNIT, pause=0.0005))  # 100 MiB in a second, see PART
        assert max(found) < size
        keeper.look()
        assert on_disk(tmp_path) <= LIMIT + MIB
    check(log, size, TAIL if holes else 8 * UNIT)
    assert os.listdir(log.parent) == ["stdout.log"]


def test_a_slower_writer_never_has_much_more_than_the_limit(log: Path, tmp_path: Path, holes: bool) -> None:
    size = 300 * UNIT
    with LogKeeper(tmp_path):
        found = watched(tmp_path, written(log, size // UNIT, pause=0.01))
        assert max(found) < size
    check(log, size, TAIL if holes else 12 * UNIT)


def test_a_writer_that_appends(log: Path, tmp_path: Path, holes: bool) -> None:
    """`make` makes its output so, and others that inherit it from there."""
    size = 200 * UNIT
    with LogKeeper(tmp_path):
        found = watched(tmp_path, written(log, size // UNIT, pause=0.01, mode="a"))
        assert max(found) < size
    text = log.read_bytes()
    assert len(text) <= LIMIT
    assert text[:HEAD] == content(0, HEAD)
    assert LINE.match(text, HEAD)
    assert text.endswith(content(size - UNIT, size))
    assert b"\0" not in text
    assert len(text) >= HEAD + (TAIL if holes else 12 * UNIT)


@pytest.mark.parametrize("more", [-1, 0, 1, UNIT])
def test_a_writer_that_appends_as_much_again(
    log: Path, tmp_path: Path, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks of a keeper that the machine does not let run: the size alone does not tell who writes."""
    monkeypatch.setattr(rank_logs, "_fallocate", None)
    first = LIMIT + UNIT
    size = 2 * first + more
    keeper = LogKeeper(tmp_path)
    log.write_bytes(content(0, first))
    keeper.look()
    with open(log, "ab") as writer:
        writer.write(content(first, size))
    keeper.settle()
    text = log.read_bytes()
    assert text[:HEAD] == content(0, HEAD)
    assert text[HEAD:] == rank_logs._line(size - HEAD - TAIL) + content(size - TAIL, size)


def test_the_end_survives_a_writer_that_outruns_the_copy(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file system has no holes. The last lines of a log say why a rank has failed."""
    size, late, copy = LIMIT + UNIT, 5 * UNIT, rank_logs._copy

    def while_it_is_written(file: int, begin: int, end: int, path: Path, *how: int) -> int:
        copied = copy(file, begin, end, path, *how)
        if path.name.endswith(".next") and log.stat().st_size == size:
            with open(log, "ab") as writer:
                writer.write(content(size, size + late))
        return copied

    monkeypatch.setattr(rank_logs, "_fallocate", None)
    monkeypatch.setattr(rank_logs, "_copy", while_it_is_written)
    log.write_bytes(content(0, size))
    keeper = LogKeeper(tmp_path)
    keeper.look()
    keeper.settle()
    text = log.read_bytes()
    assert text.startswith(content(0, HEAD))
    assert text.endswith(content(size + late - UNIT, size + late))
    kept = len(re.sub(LINE, b"", text))
    left_out = re.findall(rb"autoddp: ([0-9.]+) ([KM])iB left out", text)
    assert len(left_out) == 2
    total = sum(float(number) * {b"K": 1 / 1024, b"M": 1}[unit] for number, unit in left_out)
    assert total == pytest.approx((size + late - kept) / MIB, abs=0.1)


@pytest.mark.parametrize("size", [0, 1, HEAD - 1, HEAD, HEAD + 1, HEAD + TAIL + 1, LIMIT - 1, LIMIT])
def test_a_log_within_the_limit_stays_as_it_is(log: Path, tmp_path: Path, holes: bool, size: int) -> None:
    log.write_bytes(content(0, size) if size < 100 else b"x" * size)
    before = log.stat()
    text = log.read_bytes()
    keeper = LogKeeper(tmp_path)
    keeper.look()
    keeper.settle()
    assert (log.stat().st_mtime_ns, log.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    assert log.read_bytes() == text


@pytest.mark.parametrize("more", [1, whole(4096), whole(UNIT), 40 * UNIT])
@pytest.mark.parametrize("looks", [0, 1, whole(2)])
def test_a_log_beyond_the_limit(log: Path, tmp_path: Path, holes: bool, more: int, looks: int) -> None:
    """However it came to be, also at once, and looked at or not."""
    size = LIMIT + more
    log.write_bytes(os.urandom(UNIT) * (size // UNIT) + b"e" * (size % UNIT))
    text = log.read_bytes()
    keeper = LogKeeper(tmp_path)
    for _ in range(looks):
        keeper.look()
    keeper.settle()
    found = log.read_bytes()
    line = LINE.match(found, HEAD)
    assert line is not None
    tail = found[line.end() :]
    assert found[:HEAD] == text[:HEAD]
    assert len(found) <= LIMIT
    assert tail == text[-len(tail) :]
    assert len(tail) == (TAIL if holes or not looks else 12 * UNIT)
    assert data_size(size - HEAD - len(tail)).encode() in line[0]
    keeper.settle()
    keeper.look()
    assert log.read_bytes() == found


def test_the_next_file_of_the_same_name(log: Path, tmp_path: Path, holes: bool) -> None:
    keeper = LogKeeper(tmp_path)
    for letter in (b"a", b"b"):
        log.unlink(missing_ok=True)
        log.write_bytes(letter * (2 * LIMIT))
        keeper.look()
        keeper.settle()
        found = log.read_bytes()
        assert len(found) <= LIMIT
        assert set(LINE.sub(b"", found)) == {letter[0]}


def test_nccl_and_elastic_write_to_the_folder_itself(tmp_path: Path) -> None:
    large = [tmp_path / "nccl.node7.4711.log", tmp_path / "elastic.log"]
    others = [tmp_path / "journal.jsonl", tmp_path / "summary.json"]
    for path in (*large, *others):
        path.write_bytes(b"x" * (LIMIT + UNIT))
    with LogKeeper(tmp_path):
        pass
    assert all(path.stat().st_size <= LIMIT for path in large)
    assert all(path.stat().st_size == LIMIT + UNIT for path in others)


def _link(target: Path, log: Path) -> None:
    log.symlink_to(target)


def _second_name(target: Path, log: Path) -> None:
    os.link(target, log)


@pytest.mark.parametrize("make", [_link, _second_name])
def test_a_file_that_is_the_users_too_is_not_touched(
    log: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, make: Callable[[Path, Path], None]
) -> None:
    target = tmp_path_factory.mktemp("theirs") / "data.log"
    target.write_bytes(b"x" * (LIMIT + UNIT))
    make(target, log)
    make(target, tmp_path / "nccl.x.log")
    with LogKeeper(tmp_path):
        time.sleep(0.1)
    assert target.read_bytes() == b"x" * (LIMIT + UNIT)


@pytest.mark.parametrize(
    "place",
    [
        "written/attempt_0/0/stdout.log",
        "written/data/stdout.log",
        "scratch/1f2e.tune0_x7k2/attempt_0/0/stdout.log",
        "1f2e.tune0_x7k2/attempt_0/0/data.log",
        "1f2e.tune0_x7k2/attempt_0/stdout.log",
        "1f2e.tune0_x7k2/stdout.log",
    ],
)
def test_what_the_script_wrote_is_not_touched(tmp_path: Path, place: str) -> None:
    """Under guard its files are below the attempt's folder, and it reads them again."""
    path = tmp_path / place
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * (LIMIT + UNIT))
    with LogKeeper(tmp_path):
        time.sleep(0.1)
    assert path.stat().st_size == LIMIT + UNIT


def test_a_pipe_does_not_stop_it(log: Path, tmp_path: Path) -> None:
    os.mkfifo(log)
    (log.parent / "stderr.log").write_bytes(b"x" * (LIMIT + UNIT))
    with LogKeeper(tmp_path):
        pass
    assert (log.parent / "stderr.log").stat().st_size <= LIMIT


def test_a_folder_that_is_not_there_yet_or_no_more(tmp_path: Path) -> None:
    with LogKeeper(tmp_path / "absent") as keeper:
        assert keeper.look() == 0
        keeper.settle()


def test_a_full_disk_loses_neither_head_nor_log(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without holes room is made by copying first. If that fails nothing is cut, and the next look tries again."""
    monkeypatch.setattr(rank_logs, "_fallocate", None)
    log.write_bytes(b"x" * (2 * LIMIT))
    keeper = LogKeeper(tmp_path)
    real = os.write

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    keeper.look()
    assert log.stat().st_size == 2 * LIMIT
    monkeypatch.setattr(os, "write", real)
    keeper.look()
    keeper.settle()
    assert len(log.read_bytes()) <= LIMIT
    assert os.listdir(log.parent) == ["stdout.log"]


def test_looking_costs_next_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where little is written it looks four times a second at most, at sizes alone."""
    for rank in range(16):
        folder = tmp_path / "1f2e.tune0_x7k2" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        for name in ("stdout.log", "stderr.log"):
            (folder / name).write_text("a few lines")
    looks: list[int] = []
    opened: list[Path] = []
    look = LogKeeper.look
    monkeypatch.setattr(LogKeeper, "look", lambda keeper: looks.append(look(keeper)) or looks[-1])
    monkeypatch.setattr(rank_logs._Log, "_opened", lambda log: opened.append(log.path))
    began = time.monotonic()
    with LogKeeper(tmp_path):
        time.sleep(2)
    assert 1 <= len(looks) <= (time.monotonic() - began) / rank_logs._SLOW + 2
    assert set(looks) == {32 * len("a few lines")}
    assert opened == []
