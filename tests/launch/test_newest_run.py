"""`.autoddp/latest` leads to the newest run, git does not see it, and what the user has there stays."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from autoddp.runs.latest import as_latest, newest, point_to


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two, the older one first."""
    folders = [tmp_path / ".autoddp" / f"20261126-03333{number}-host0-14540" for number in range(2)]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text("{}")
    return folders


def test_it_follows_the_newest_run(runs: list[Path]) -> None:
    for run in runs:
        link = point_to(run)
        assert link == run.parent / "latest"
        assert os.readlink(link) == run.name
        assert as_latest(run / "report.html") == link / "report.html"
    assert as_latest(runs[0] / "report.html") == runs[0] / "report.html"
    assert sorted(os.listdir(link.parent)) == [".gitignore", *(run.name for run in runs), "latest"]
    assert newest(link.parent, "summary.json") == runs[1] / "summary.json"


def test_git_sees_nothing_of_it(runs: list[Path], tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    point_to(runs[0])
    status = ["git", "status", "--porcelain", "--untracked-files=all"]
    assert subprocess.run(status, cwd=tmp_path, check=True, capture_output=True).stdout == b""


@pytest.mark.parametrize("theirs", ["file", "folder", "link", "dangling link", ".gitignore", "no writing"])
def test_what_the_user_has_there_stays(runs: list[Path], theirs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    latest = runs[0].parent / "latest"
    if theirs == "file":
        latest.write_text("mine")
    elif theirs == "folder":
        latest.mkdir()
    elif theirs == "link":
        latest.symlink_to(runs[0])  # by its whole path: no link of ours
    elif theirs == "dangling link":
        latest.symlink_to("../nowhere")
    elif theirs == ".gitignore":
        latest.with_name(".gitignore").write_text("!summary.json\n")
    else:
        monkeypatch.setattr("os.symlink", lambda *_: os.stat("/nowhere"))
    before = sorted((path, path.is_symlink() and os.readlink(path)) for path in latest.parent.iterdir())
    assert point_to(runs[1]) is None
    after = sorted((path, path.is_symlink() and os.readlink(path)) for path in latest.parent.iterdir())
    assert [one for one in after if one[0].name != ".gitignore"] == [
        one for one in before if one[0].name != ".gitignore"
    ]
    if theirs == ".gitignore":
        assert latest.with_name(".gitignore").read_text() == "!summary.json\n"
    assert as_latest(runs[1] / "report.html") == runs[1] / "report.html"


def test_a_link_to_a_run_that_was_removed(runs: list[Path]) -> None:
    link = point_to(runs[0])
    assert link is not None
    (runs[0] / "summary.json").unlink()
    runs[0].rmdir()
    assert newest(link.parent, "summary.json") == runs[1] / "summary.json"
    assert point_to(runs[1]) == link
    assert link.resolve() == runs[1].resolve()
