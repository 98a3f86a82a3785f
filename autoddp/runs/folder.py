"""The folder of one tuning run, `.autoddp/<date>-<host>-<pid>/`, and the removal of what earlier runs left.

A run folder has logs, the journal, scratch, summary.json and report.html. Left by earlier runs are private folders and
scratch of killed launchers, and the oldest run folders. The mark in a folder (see `owner`) tells whether it is one of
these, never its name. In doubt the folder stays.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from autoddp.errors import RecipeError, UsageError
from autoddp.files import write_private
from autoddp.log import printable
from autoddp.recipe import load
from autoddp.runs.owner import MARK, Claim, Mark, Marked, Owner, marked_in, read_mark
from autoddp.runs.removal import opened, remove_contents, remove_entry
from autoddp.runs.usual_folders import make

PREFIX = "autoddp-"
"""The names of private folders begin so. It only saves a look into every other folder."""
PREVIOUS = "previous.autoddp.toml"
"""The file that was where a run wrote its recipe; a second one is called `previous.autoddp.toml.2`."""
_ATTEMPT = re.compile(r"attempt\d+")
_OF_THE_RUN = ("caches",)
CALLS = "calls"
"""Folder of an attempt for what its processes record of their collectives."""
_WRITTEN = ("scratch", "written")
_OF_AN_ATTEMPT = ("heartbeats", *_WRITTEN, CALLS)
_LONGEST = 103 - len(f"/{PREFIX}12345678/s")  # bytes of a folder for sockets, whose paths may have 103 (macOS)
_TEMPORARY = "set TMPDIR to a folder that can be written"


class RunFolder:
    """Made at once, so that a place that cannot be written is an error before anything is started.

        folder = RunFolder(Path(".autoddp"), keep_runs=20, recipe=Path("train.autoddp.toml"))
        for line in folder.says:
            print(line)
        layers = folder.private(Path("/var/tmp"))    # a folder elsewhere that ends with the run

    Only this user can enter it and the folders that it makes. First it removes what killed launchers left in the output
    folder, the temporary folder and `places`; then the oldest runs, until `keep_runs` are left (None: they all stay).
    """

    def __init__(
        self, output: Path, *, keep_runs: int | None = None, recipe: Path | None = None, places: Iterable[Path] = ()
    ) -> None:
        self._owner = Owner.of_this_process()
        temporary = temporary_folder()
        try:
            self.path = _new_folder(output)
            self._claim = Claim(self.path, self._owner, self.path.name)
            write_private(self.path / ".gitignore", "*\n")  # else `git add -A`, also in the script, would add the logs
        except OSError as error:
            raise UsageError(
                f"--output {output}: cannot be written ({error.strerror}); name a folder that can"
            ) from None
        self._claims: list[Claim] = []
        # The launcher may end before it tunes, for example because the hosts cannot meet.
        atexit.register(self._end)
        self.says = _tidied(self.path.parent, keep_runs, recipe, [temporary, *places])
        """Lines for the user: what was removed."""
        try:
            self.sockets = self.private(_short(temporary))
            """A private folder whose path is short enough for Unix sockets in it."""
        except OSError as error:
            raise UsageError(f"{temporary}: cannot be written ({error.strerror}); {_TEMPORARY}") from None
        self.socket = str(self.sockets / "s")
        """The launcher's socket, to which the workers connect."""
        self.journal = self.path / "journal.jsonl"
        """One line for each measurement."""
        self.log = self.path / "tuning.log"
        """What the study has said, with details that are not shown."""
        self.summary = self.path / "summary.json"
        """The study's results, for programs."""
        self.report = self.path / "report.html"
        """The study's results, for people."""
        self.trace = self.path / "trace.json"
        """Some steps of all ranks, for Perfetto or Chrome."""
        self.previous_recipe = self.path / PREVIOUS
        """The path for a recipe that is about to be replaced."""

    @property
    def see(self) -> str:
        """The end of a line that leads the user to this folder; "" where it is gone: the user may have removed it."""
        return f"; see {self.path}" if self.path.is_dir() else ""

    def why_not_written(self, error: OSError) -> str:
        """Why a file of this run could not be made, and what to do."""
        if not self.path.is_dir():
            return f"{printable(str(self.path))} was removed meanwhile"
        place = printable(error.filename or str(self.path))
        return f"{place} cannot be written ({error.strerror or error}); --output names another place"

    @property
    def has_locks(self) -> bool:
        """Whether its file system has locks: Lustre without `-o flock`, and some other network disks, have none."""
        return self._claim.mark.locked

    def attempt(self, number: int) -> Path:
        """A folder for attempt `number`: its logs, which stay, `heartbeats` and `calls`, which are removed at the end.

        `scratch` and `written` in it, and `caches` beside it, are removed then too.
        """
        folder = self.path / f"attempt{number}"
        for new in (folder, folder / "heartbeats", folder / CALLS):
            new.mkdir(mode=0o700)
        return folder

    def forget_what_was_written(self, number: int) -> None:
        """Remove what the script wrote in attempt `number`, which has ended on all hosts. Never raises.

        Each attempt may write as much as the job: all of them together would fill the disk.
        """
        with opened(self.path / f"attempt{number}") as folder:
            if folder is not None:
                for name in _WRITTEN:
                    _remove_folder(folder, name)

    def private(self, place: Path) -> Path:
        """A new folder in `place`, for this user alone, that is removed when the run ends. OSError where none can be.

        If this process is killed, the next run removes it, provided that it looks into `place` or into `output`.
        """
        while True:
            with contextlib.suppress(FileExistsError):
                return self.owns(place / f"{PREFIX}{secrets.token_hex(4)}")

    def owns(self, path: Path) -> Path:
        """Make the folder `path`, as `private` does, under a name that the caller chooses; its path without links.

        FileExistsError if there is anything already: this run then neither uses nor removes it.
        """
        place = Path(os.path.realpath(path.parent)) / path.name
        # Recorded before it is made: if the launcher is killed in between, the record names nothing. In the other order
        # a folder would be left that no record names.
        self._claim.change(folders=(*self._claim.mark.folders, str(place)))
        place.mkdir(mode=0o700)
        self._claims.append(Claim(place, self._owner, self.path.name))
        return place

    def clean(self) -> None:
        """Remove what is not needed after tuning: private folders, and what the script wrote while it was tuned.

        Never raises. In a child that this process has forked it does nothing.
        """
        if os.getpid() != self._owner.pid:
            return
        while self._claims:  # before their marks are removed: NFS keeps a file that is open by another name
            self._claims.pop().close()
        for folder in self._claim.mark.folders:
            remove_private(folder, self._claim.mark)
        run = read_mark(self.path)
        if run is not None:
            with closing(run):
                remove_scratch(run)

    def _end(self) -> None:
        """Note in the mark that this process ends: launchers on other hosts have no other way to know."""
        self.clean()
        if os.getpid() == self._owner.pid:
            with contextlib.suppress(OSError):
                self._claim.change(ended=True)


def temporary_folder() -> Path:
    """Python's choice. UsageError where there is none: then torchrun has no place for its logs either."""
    try:
        return Path(tempfile.gettempdir())
    except OSError:
        raise UsageError(f"no temporary folder takes files ($TMPDIR, /tmp, /var/tmp, …); {_TEMPORARY}") from None


def _short(temporary: Path) -> Path:
    """A temporary folder with a path short enough for Unix sockets: that of $TMPDIR may be too long."""
    for place in (temporary, Path("/tmp"), Path("/var/tmp")):
        fits = len(os.fsencode(os.path.realpath(place))) <= _LONGEST
        if fits and os.access(place, os.W_OK | os.X_OK):
            return place
    raise UsageError(f"{temporary}: too long for a Unix socket's path; set TMPDIR to one of {_LONGEST} bytes or less")


def _new_folder(output: Path) -> Path:
    """A name may be taken already: hosts and containers with the same process id may share the output folder."""
    make(output)
    host = re.sub(r"[^A-Za-z0-9_-]", "_", socket.gethostname().partition(".")[0])[:40]
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{host or 'host'}-{os.getpid()}"
    root = Path(os.path.realpath(output))
    path, number = root / name, 1
    while True:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path
        number += 1
        path = root / f"{name}-{number}"


def _tidied(output: Path, keep_runs: int | None, recipe: Path | None, places: Iterable[Path]) -> tuple[str, ...]:
    says = []
    cleaned = clean_leftovers(output, places)
    if cleaned:
        says.append(f"cleaned what a killed run left: {', '.join(cleaned)}")
    if keep_runs is not None:
        recipes = [Path(), output.parent, *([recipe, recipe.parent] if recipe else [])]
        older = remove_older_runs(output, keep_runs, recipes)
        if older:
            noun = "the oldest run folder" if len(older) == 1 else f"the {len(older)} oldest run folders"
            says.append(f"removed {noun} in {output}: --keep-runs {keep_runs}")
    return tuple(says)


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
