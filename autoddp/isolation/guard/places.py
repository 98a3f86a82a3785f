"""A name in the script's view, and a folder of it."""

from __future__ import annotations

import errno
import stat
from dataclasses import dataclass

from autoddp.isolation.guard import real


@dataclass(eq=False)
class Folder:
    """A folder of the script's view."""

    place: Place
    """Its own entry in its parent."""
    path: str
    """Its path in the script's view, free of symbolic links."""
    upper: bool
    """Whether `upper` has a folder of this path."""
    lower: str | None
    """The real folder that shows through."""
    through: bool
    """Nothing is redirected in here."""

    def child_path(self, name: str) -> str:
        """The path of an entry."""
        return f"/{name}" if self.path == "/" else f"{self.path}/{name}"

    def beneath(self, name: str) -> str | None:
        """The real path that an entry of this name would show."""
        return None if self.lower is None else f"{self.lower.rstrip('/')}/{name}"


@dataclass(eq=False)
class Place:
    """One name in a folder of the script's view, whether or not there is something."""

    folder: Folder | None
    """None only for the root."""
    name: str
    path: str
    """In the script's view, free of symbolic links up to the last part."""
    physical: str
    """Where it lies, or where it would be made."""
    status: real.Status | None
    """`lstat` of it; None where nothing is."""
    upper: bool = False
    """It lies in `upper`."""
    through: bool = False
    slash: bool = False
    """The path as given ended in a slash or a dot, so it must be a folder."""
    dot: str = ""
    """The last part of the path as given was `.` or `..`: this one."""
    links: int = 0
    """How many symbolic links were followed on the way."""

    @property
    def exists(self) -> bool:
        return self.status is not None

    @property
    def is_folder(self) -> bool:
        return self.status is not None and stat.S_ISDIR(self.status.st_mode)

    @property
    def is_link(self) -> bool:
        return self.status is not None and stat.S_ISLNK(self.status.st_mode)

    @property
    def is_file(self) -> bool:
        return self.status is not None and stat.S_ISREG(self.status.st_mode)

    @property
    def is_real(self) -> bool:
        """Something of the user's, which must stay as it is."""
        return self.status is not None and not self.upper and not self.through

    def found(self) -> real.Status:
        """Its status; ENOENT if there is nothing."""
        if self.status is None:
            real.fail(errno.ENOENT)
        return self.status
