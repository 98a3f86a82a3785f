"""The snapshot sees every kind of change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from traces.snapshot import difference, take


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    for name in ("a.txt", "b.txt", "folder/c.txt"):
        (tmp_path / name).write_text(f"{name}\n")
    (tmp_path / "link").symlink_to("a.txt")
    for path in (*tmp_path.rglob("*"), tmp_path):
        os.utime(path, (1, 1), follow_symlinks=False)
    return tmp_path


def test_looking_changes_nothing(tree: Path) -> None:
    assert difference(take(tree), take(tree)) == []


@pytest.mark.parametrize(
    ("change", "path", "word"),
    [
        (lambda tree: (tree / "a.txt").unlink(), "a.txt", "is gone"),
        (lambda tree: (tree / "new").touch(), "new", "is new"),
        (lambda tree: (tree / "a.txt").chmod(0o600), "a.txt", "mode"),
        (lambda tree: os.utime(tree / "a.txt", (2, 2)), "a.txt", "mtime_ns"),
        (lambda tree: os.utime(tree / "folder", (2, 2)), "folder", "mtime_ns"),
        (lambda tree: os.link(tree / "a.txt", tree / "hard"), "a.txt", "nlink"),
        (lambda tree: os.replace(tree / "b.txt", tree / "a.txt"), "a.txt", "digest"),
        (lambda tree: (tree / "folder/c.txt").write_text("folder/C.txt\n"), "folder/c.txt", "digest"),
        (lambda tree: ((tree / "link").unlink(), (tree / "link").symlink_to("b.txt")), "link", "target"),
        (lambda tree: ((tree / "link").unlink(), (tree / "link").mkdir()), "link", "kind"),
        (lambda tree: os.mkfifo(tree / "pipe"), "pipe", "a fifo"),
    ],
)
def test_each_change_is_seen(tree: Path, change, path: str, word: str) -> None:
    before = take(tree)
    change(tree)
    lines = [line for line in difference(before, take(tree)) if line.startswith(f"{path}: ")]
    assert len(lines) == 1
    assert word in lines[0]


def test_what_is_left_out_is_not_seen(tree: Path) -> None:
    before = take(tree / "folder", [tree / "folder" / "run"])
    times = (tree / "folder").stat()
    (tree / "folder" / "run").mkdir()
    (tree / "folder" / "run" / "log").touch()
    os.utime(tree / "folder", ns=(times.st_atime_ns, times.st_mtime_ns))
    lines = difference(before, take(tree / "folder", [tree / "folder" / "run"]))
    assert [line for line in lines if not line.startswith(".: nlink")] in ([], [".: nlink 2 -> 3"])
    assert take(tree, deep=False).keys() == {"a.txt", "b.txt", "folder", "link"}
