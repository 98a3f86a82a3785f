"""Where run folders and recipes go if the user names no place: the current folder, or another one if that is read-only.

    folders = usual_folders()
    folders.output       # .autoddp, or one in the user's own folder for such things
    folders.recipes      # the folder of recipes

A folder elsewhere belongs to one current folder: the next run there finds it again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

OUTPUT = Path(".autoddp")


@dataclass(frozen=True)
class Folders:
    """`output` and `recipes` are elsewhere only where the current folder takes no such files."""

    output: Path = OUTPUT
    recipes: Path = Path()

    def make(self) -> None:
        """Make a folder for recipes that is elsewhere. OSError if it cannot be, or if others may write there."""
        if self.recipes != Path():
            make(self.recipes)
            if not _is_mine_alone(self.recipes.parent, self.recipes):
                raise PermissionError(errno.EPERM, "others may write there", str(self.recipes))


def usual_folders() -> Folders:
    """Those of the current folder. Nothing is made. Where there is no place elsewhere either, they stay as usual."""
    output, recipes = _takes_files(OUTPUT), _takes_files(Path())
    other = None if output and recipes else elsewhere()
    if other is None:
        return Folders()
    return Folders(OUTPUT if output else other.output, Path() if recipes else other.recipes)


def elsewhere() -> Folders | None:
    """What `usual_folders` would be in a current folder that takes no files; None where there is no other place.

    For a folder that looks as if it took files, and then takes none: on a full disk, for example.
    """
    place = next((place for place in _places() if _is_mine_alone(place.parent, place) and _takes_files(place)), None)
    return None if place is None else Folders(place / "runs", place)


def make(folder: Path) -> None:
    """The folder and those above it that are missing, for this user alone. OSError if it cannot be, or is another's."""
    if not folder.is_dir():
        make(folder.absolute().parent)
        with contextlib.suppress(FileExistsError):  # another node's launcher has just made it, or it is a file
            folder.mkdir(mode=0o700)


def _places() -> list[Path]:
    """Best first: where state belongs (the XDG base directories); the temporary folder, for users without a home."""
    try:
        here = os.path.realpath(os.getcwd())
    except OSError:  # it was removed
        return []
    name = f"{os.path.basename(here) or 'root'}-{hashlib.sha256(os.fsencode(here)).hexdigest()[:8]}"
    state = os.environ.get("XDG_STATE_HOME", "")
    home = Path(state) if os.path.isabs(state) else Path(os.path.expanduser("~")) / ".local" / "state"
    places = [home / "autoddp" / name]
    with contextlib.suppress(OSError):  # there is no temporary folder that takes files
        places.append(Path(tempfile.gettempdir()) / f"autoddp-of-user-{os.geteuid()}" / name)
    return places


def _is_mine_alone(*folders: Path) -> bool:
    """Whether nobody else has made them, or may write there: their names are known, and recipes are read there."""
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
    """Whether files can be made in it, or it can be made."""
    try:
        there = folder.absolute()
        while not os.path.lexists(there) and there != there.parent:
            there = there.parent
        return there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    except OSError:
        return False
