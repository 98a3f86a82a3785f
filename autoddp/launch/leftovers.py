"""Removing what earlier runs left: private folders and scratch of killed launchers, and the oldest run folders.

The mark in a folder (see `owner`) tells whether it is one of these, never its name. In doubt the folder stays.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from autoddp.errors import RecipeError
from autoddp.launch.owner import MARK, Mark, Marked, marked_in, read_mark
from autoddp.launch.removal import opened, remove_contents, remove_entry
from autoddp.recipe import load

PREFIX = "autoddp-"
"""The names of private folders begin so. It only saves a look into every other folder."""
PREVIOUS = "previous.autoddp.toml"
"""The file that was where a run wrote its recipe; a second one is called `previous.autoddp.toml.2`."""
_ATTEMPT = re.compile(r"attempt\d+")
_OF_THE_RUN = ("caches",)
_OF_AN_ATTEMPT = ("heartbeats", "scratch", "written")


def clean_leftovers(output: Path, places: Iterable[Path] = ()) -> list[str]:
    """Remove what launchers of this host left that have ended; what was removed, for people. Never raises.

    `output` holds run folders. In `places` there may be private folders whose run folder is gone.
    """
    removed: list[str] = []
    for run in marked_in(output):
        if run.may_be_cleaned():
            removed += [path for path in run.mark.folders if remove_private(path, run.mark)]
            removed += [f"scratch in {run.path}"] if remove_scratch(run) else []
    for place in dict.fromkeys(os.path.realpath(place) for place in places):
        for private in marked_in(place, PREFIX):
            if _is_private(private) and private.may_be_cleaned() and _remove(private):
                removed.append(str(private.path))
    return removed


def remove_private(path: str, run: Mark) -> bool:
    """Remove a private folder that `run` recorded, if its own mark says that it belongs to that run and no other."""
    private = read_mark(path)
    if private is None:
        return False
    with closing(private):
        same = (private.mark.run, private.mark.owner) == (run.run, run.owner)
        return same and _is_private(private) and _remove(private)


def remove_scratch(run: Marked) -> bool:
    """Remove what the script wrote inside the run folder; whether anything was removed."""
    removed = [_remove_folder(run.folder, name) for name in _OF_THE_RUN]
    for attempt in filter(_ATTEMPT.fullmatch, _names(run.folder)):
        with opened(attempt, run.folder) as folder:
            if folder is not None:
                removed += [_remove_folder(folder, name) for name in _OF_AN_ATTEMPT]
    return any(removed)


def remove_older_runs(output: Path, keep: int, recipes: Iterable[Path]) -> list[str]:
    """Remove the oldest of the run folders in `output` until `keep` are left; the paths of what was removed.

    A run folder always stays if its launcher runs or may run, if another user made it, or if a recipe names it:
    `recipes` are files and folders of them. Never raises.
    """
    runs = []
    for run in marked_in(output):
        gone = run.has_ended() or run.may_be_cleaned()
        runs.append((run.mark.made, run.path, gone))
    older = [path for _, path, gone in sorted(runs, reverse=True)[keep:] if gone]
    if not older:
        return []
    texts = _texts(recipes)
    if texts is None:
        return []
    return [str(path) for path in reversed(older) if not any(path.name in text for text in texts) and _remove_run(path)]


def _remove_run(path: Path) -> bool:
    run = read_mark(path)
    if run is None:
        return False
    with closing(run):
        if not (run.has_ended() or run.may_be_cleaned()):
            return False  # another launcher has begun to clean it
        if any(os.path.lexists(folder) for folder in run.mark.folders if run.mark.owner.is_here()):
            return False  # it is the record of private folders that could not be removed
        return not _keeps_a_file_of_the_user(run) and _remove(run)


def _remove(marked: Marked) -> bool:
    if _holds_us(marked.path):
        return False
    return remove_contents(marked.folder, spare=[MARK]) and marked.remove_itself()


def _keeps_a_file_of_the_user(run: Marked) -> bool:
    """Whether a file that is no recipe was where the run wrote its own, so that it was moved to the run folder."""
    for name in _names(run.folder):
        if name.startswith(PREVIOUS):
            try:
                load(run.path / name)
            except RecipeError:
                return True
    return False


def _is_private(marked: Marked) -> bool:
    """Whether it is a private folder where it was made: one that the user has moved is the user's."""
    return marked.mark.path == str(marked.path) and marked.mark.run != marked.path.name


def _holds_us(path: Path) -> bool:
    """Whether `path` is this process's current folder, or above it: the user went there to look at it."""
    try:
        return Path(os.path.realpath(os.getcwd())).is_relative_to(path)
    except OSError:
        return False


def _names(folder: int) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _remove_folder(folder: int, name: str) -> bool:
    """Whether there was a real folder of that name, and is none now."""
    try:
        there = stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False
    return there and remove_entry(folder, name)


def _texts(recipes: Iterable[Path]) -> list[str] | None:
    """The text of all recipes; None where one cannot be read.

    It is not parsed: a recipe that was edited by hand, or written by a newer version, names its run too.
    """
    texts = []
    try:
        for place in recipes:
            files = [place]
            if place.is_dir():  # not by Path.glob, which takes a folder that cannot be read for an empty one
                files = [place / name for name in os.listdir(place) if name.endswith(".toml")]
            texts += [file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()]
    except OSError:
        return None
    return texts
