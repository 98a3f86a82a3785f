"""`.autoddp/latest`, a link to the folder of the newest run.

point_to(Path(".autoddp/20261126-033334-host0-14540"))
newest(Path(".autoddp"), "summary.json")        # the newest run that has this file, link or no link
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from autoddp.files import read_at_most

LATEST = "latest"
_IGNORE = "*\n"


def point_to(run: Path) -> Path | None:
    """Make `latest`, beside the run's folder, a link to that folder. The link's path; None where none can be made.

    Only for a folder that autoddp has named itself: git must not see the link, so a .gitignore is put beside it.
    What the user has there stays: a .gitignore with another content, or anything called `latest` that is no such link.
    """
    link = run.parent / LATEST
    try:
        if not _is_hidden_from_git(run.parent) or (os.path.lexists(link) and not _leads_beside(link)):
            return None
        new = run.parent / f".{LATEST}-{secrets.token_hex(4)}"
        os.symlink(run.name, new)
        try:
            os.replace(new, link)  # at once: who follows the link meanwhile finds one run or the other
        except OSError:
            new.unlink()
            raise
    except OSError:  # a file system without links; the run's folder has its name all the same
        return None
    return link


def as_latest(file: Path) -> Path:
    """The file of a run by the link's shorter name, where the link leads to that run."""
    short = file.parent.parent / LATEST / file.name
    return short if os.path.realpath(short) == os.path.realpath(file) else file


def newest(output: Path, file: str) -> Path | None:
    """The path of `file` in the newest run in the folder `output` that has it; None where none has.

    The names of runs begin with the time.
    """
    found = [place for place in output.glob(f"*/{file}") if not place.parent.is_symlink()]
    return max(found, key=lambda place: place.parent.name, default=None)


def _is_hidden_from_git(folder: Path) -> bool:
    ignore = folder / ".gitignore"
    with contextlib.suppress(FileExistsError), open(ignore, "x", encoding="utf-8") as file:
        try:
            file.write(_IGNORE)
            file.flush()
        except OSError:
            ignore.unlink()  # the disk is full: an empty one would be taken for one that is being written
            raise
    return read_at_most(ignore, len(_IGNORE) + 1).decode(errors="replace") in ("", _IGNORE)  # "": being written now


def _leads_beside(link: Path) -> bool:
    """Whether it is a link to something in the same folder."""
    return link.is_symlink() and os.sep not in os.readlink(link)
