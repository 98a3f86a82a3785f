"""The folders for runs and recipes if the user names no place: the current folder, or another if that is read-only.

    folders = usual_folders()
    folders.output       # .autoddp, or a folder in the user's state folder
    folders.recipes      # the folder of recipes

The folder elsewhere has the current folder's name and a digest of its path, so the next run there finds it again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OUTPUT = Path(".autoddp")


@dataclass(frozen=True)
class Folders:
    """Each is in the current folder, or elsewhere if no file can be made there."""

    output: Path = OUTPUT
    recipes: Path = Path()

    def make(self) -> None:
        """Make the folder for recipes if it is elsewhere. OSError if that fails, or if others may write there."""
        if self.recipes != Path():
            make(self.recipes)
            if not _is_mine_alone(self.recipes.parent, self.recipes):
                raise PermissionError(errno.EPERM, "others may write there", str(self.recipes))


def usual_folders() -> Folders:
    """The folders for runs and recipes of the current folder; nothing is made.

    They are in the current folder if it takes files, or if there is no other place.
    """
    output, recipes = _takes_files(OUTPUT), _takes_files(Path())
    other = None if output and recipes else next(elsewhere(), None)
    if other is None:
        return Folders()
    return Folders(OUTPUT if output else other.output, Path() if recipes else other.recipes)


def elsewhere() -> Iterator[Folders]:
    """What `usual_folders` gives where no file can be made in the current folder, the best one first.

    It is called when a write fails although the folder's permissions allow it, as on a full disk, on which the first of
    these may be too.
    """
    for place in _places():
        if _is_mine_alone(place.parent, place) and _takes_files(place):
            yield Folders(place / "runs", place)


def make(folder: Path) -> None:
    """Make the folder and all missing ones above it, for this user alone. OSError if that fails."""
    if not folder.is_dir():
        make(folder.absolute().parent)
        with contextlib.suppress(FileExistsError):  # another node's launcher has just made it, or it is a file
            folder.mkdir(mode=0o700)


def _places() -> list[Path]:
    """Best first: the state folder of the XDG base directories; then the temporary folder, for users without a home."""
    try:
        here = os.path.realpath(os.getcwd())
    except OSError:  # it was removed
        return []
    name = f"{os.path.basename(here) or 'root'}-{hashlib.sha256(os.fsencode(here)).hexdigest()[:8]}"
    state = os.environ.get("XDG_STATE_HOME", "")
    home = Path(state) if os.path.isabs(state) else Path(os.path.expanduser("~")) / ".local" / "state"
    # Without HOME and an entry in passwd it is a folder "~" here, which somebody would remove by `rm -r ~`.
    places = [home / "autoddp" / name] if home.is_absolute() else []
    with contextlib.suppress(OSError):  # there is no temporary folder that takes files
        places.append(Path(tempfile.gettempdir()) / f"autoddp-of-user-{os.geteuid()}" / name)
    return places


def _is_mine_alone(*folders: Path) -> bool:
    """Whether no other user has made one of them, or may write there: others can guess the names, and recipes are read
    there. A folder that does not exist yet is no objection."""
    for folder in folders:
        try:
            found = os.lstat(folder)
        except FileNotFoundError:
            continue
        except OSError:
            return False
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            return False
    return True


def _takes_files(folder: Path) -> bool:
    """Whether files can be made in it, or else the folder itself can be made."""
    try:
        there = folder.absolute()
        while not os.path.lexists(there) and there != there.parent:
            there = there.parent
        return there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    except OSError:
        return False
