"""Files that cannot be written into the current folder go to a place of the user's own, and the next run finds them."""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from autoddp.attempts.preparation import prepared
from autoddp.commandline.saved_recipes import Note, found_recipes
from autoddp.commandline.words import parse
from autoddp.errors import UsageError
from autoddp.runs.folder import RunFolder
from autoddp.runs.usual_folders import OUTPUT, Folders, elsewhere, make, usual_folders

WORDS = ["--nproc-per-node", "2", "train.py"]


@pytest.fixture
def read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder takes no files, also for root, whom modes do not stop; home and temporary folder do."""
    here, access = tmp_path / "here", os.access
    for name in ("here", "home", "tmp"):
        (tmp_path / name).mkdir()

    def refused(path: str | Path, mode: int) -> bool:
        return not (mode & os.W_OK and os.path.realpath(path) == str(here)) and access(path, mode)

    monkeypatch.chdir(here)
    monkeypatch.setattr(os, "access", refused)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    return tmp_path


def test_a_folder_that_takes_files_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert usual_folders() == Folders()
    assert parse(WORDS).elsewhere == ""
    assert list(tmp_path.iterdir()) == []


def test_the_state_folder_of_the_user(read_only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = parse(WORDS)
    other = request.folders.recipes
    assert other.parent == read_only / "home" / ".local" / "state" / "autoddp"
    assert request.output == other / "runs"
    assert request.recipe_path == other / "here.train.autoddp.toml"
    assert f"run folders go to {request.output} (--output" in request.elsewhere
    assert f"the recipe goes to {other} (--recipe" in request.elsewhere
    assert not other.exists()  # a command line that is only read makes nothing
    request.folders.make()
    assert other.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_STATE_HOME", str(read_only / "tmp"))
    assert usual_folders().recipes == read_only / "tmp" / "autoddp" / other.name


def test_each_folder_has_its_own_place(read_only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (read_only / "home" / ".local").mkdir()
    first = usual_folders()
    assert usual_folders() == first
    (read_only / "elsewhere" / "here").mkdir(parents=True)
    monkeypatch.chdir(read_only / "elsewhere" / "here")
    assert usual_folders() == Folders()


def test_what_is_named_stays(read_only: Path) -> None:
    request = parse(["--output", "a", "--recipe", "b.toml", *WORDS])
    assert (request.output, request.recipe_path, request.elsewhere) == (Path("a"), Path("b.toml"), "")


def test_recipes_are_found_in_both_places(read_only: Path) -> None:
    request = parse(WORDS)
    assert found_recipes(request) == []
    here = Path("here.train.autoddp.toml")
    (read_only / "here" / here).touch()
    assert found_recipes(request) == [here]
    request.folders.make()
    request.recipe_path.touch()
    assert found_recipes(parse(WORDS)) == [request.recipe_path, here]


def test_notes_stand_beside_a_recipe_or_where_new_recipes_go(read_only: Path) -> None:
    request = parse(WORDS)
    assert Note(Path("a.toml"), request).path == request.folders.recipes / "a.unfit"
    assert Note(Path("b/a.toml"), request).path == Path("b/a.unfit")
    assert Note(Path("a.toml"), replace(request, folders=Folders())).path == Path("a.unfit")


def test_without_a_home_the_temporary_folder_unless_others_may_write_there(read_only: Path) -> None:
    (read_only / "home").rmdir()
    (read_only / "home").write_text("no folder")
    folders = usual_folders()
    mine = folders.recipes.parent
    assert mine.parent == read_only / "tmp"
    folders.make()
    assert usual_folders() == folders
    mine.chmod(0o777)
    assert usual_folders() == Folders()
    with pytest.raises(PermissionError):
        folders.make()
    mine.chmod(0o700)
    mine.rename(mine.with_name("theirs"))
    mine.symlink_to(mine.with_name("theirs"))
    assert usual_folders() == Folders()


def test_without_a_home_no_folder_called_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user without an entry in passwd, in a folder where only `.autoddp` is another user's."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    found = next(elsewhere(), None)
    assert found is not None
    assert found.recipes.is_relative_to(tmp_path / "tmp")


@pytest.mark.parametrize("level", ["autoddp", "autoddp/NAME"])
def test_a_folder_for_state_in_which_others_may_write_is_not_used(read_only: Path, level: str) -> None:
    usual = usual_folders().recipes
    theirs = usual.parents[1] / level.replace("NAME", usual.name)
    theirs.mkdir(parents=True)
    theirs.chmod(0o777)
    folders = usual_folders()
    assert folders.recipes.parent.parent == read_only / "tmp"
    folders.make()


@pytest.fixture
def no_temporary_folder(read_only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose file systems are all read-only; the current folder counts as the last temporary one."""

    def refused(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile._os, "open", refused)  # type: ignore[attr-defined]
    with pytest.raises(FileNotFoundError):
        tempfile.gettempdir()


def test_without_a_temporary_folder(no_temporary_folder: None, read_only: Path) -> None:
    assert usual_folders().recipes.is_relative_to(read_only / "home")
    with pytest.raises(UsageError, match="no temporary folder takes files"):
        RunFolder(Path(".autoddp"))
    with pytest.raises(UsageError, match="no temporary folder takes files"), prepared(parse(WORDS)):
        pass
    assert {path.name for path in read_only.rglob("*")} == {"here", "home", "tmp"}


def test_an_output_folder_that_is_writable_is_used_in_a_folder_that_is_not(read_only: Path) -> None:
    OUTPUT.mkdir()
    request = parse(WORDS)
    assert request.output == OUTPUT
    assert "run folder" not in request.elsewhere
    assert "recipe" in request.elsewhere


def test_where_only_the_folder_for_runs_is_another_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / OUTPUT).touch()  # takes no files, whoever asks
    monkeypatch.chdir(tmp_path)
    request = parse(WORDS)
    assert request.recipe_path == Path(f"{tmp_path.name}.train.autoddp.toml")
    assert request.elsewhere.startswith(f"the folder .autoddp cannot be written: run folders go to {request.output} (")


def test_folders_are_made_for_this_user_alone(tmp_path: Path) -> None:
    make(tmp_path / "a" / "b")
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o700, 0o700]
