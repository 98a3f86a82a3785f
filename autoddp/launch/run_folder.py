"""The folder of one tuning run, `.autoddp/<date>-<host>-<pid>/`: logs, journal, scratch and summary.json."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from autoddp.errors import UsageError
from autoddp.launch.leftovers import (
    PREFIX,
    PREVIOUS,
    clean_leftovers,
    remove_older_runs,
    remove_private,
    remove_scratch,
)
from autoddp.launch.owner import Claim, Owner, read_mark
from autoddp.launch.usual_folders import make

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
        """The launcher's, to which the workers connect."""
        self.journal = self.path / "journal.jsonl"
        """One line for each measurement."""
        self.log = self.path / "tuning.log"
        """What the study has said, with details that are not shown."""
        self.summary = self.path / "summary.json"
        """The study's results, for programs."""
        self.previous_recipe = self.path / PREVIOUS
        """Where a recipe goes that is about to be replaced."""

    def attempt(self, number: int) -> Path:
        """A folder for attempt `number`: its logs, which stay, and `heartbeats`, which is removed when the run ends.

        `scratch` and `written` in it, and `caches` beside it, are removed then too.
        """
        folder = self.path / f"attempt{number}"
        (folder / "heartbeats").mkdir(parents=True)
        return folder

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
        for folder in self._claim.mark.folders:
            remove_private(folder, self._claim.mark)
        run = read_mark(self.path)
        if run is not None:
            with contextlib.closing(run):
                remove_scratch(run)
        while self._claims:
            self._claims.pop().close()

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
    """Under another name where one is taken: hosts and containers with the same process id may share the folder."""
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
