"""Every measurement of a tuning run, one JSON line each, the same on every node.

The launcher that leads writes it, and the others copy it: whichever of them leads the next run can go on with a study
that was cut off. It also holds each block's times, to check a figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autoddp.codec import encode, replace
from autoddp.files import append
from autoddp.log import get_logger
from autoddp.wire import Entry, Measure, Start

logger = get_logger(__name__)


class Lines:
    """A file to which lines are added, each at once. On a full disk it ends, and whoever writes it goes on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._count = 0
        self._is_whole = True

    def add(self, line: str) -> None:
        """Add a line, unless one before it could not be added."""
        if not self._is_whole:
            return
        try:
            append(self._path, line + "\n")
            self._count += 1
        except OSError as error:
            self._is_whole = False
            logger.warning("%s ends after %d lines: %s", self._path, self._count, error.strerror)


class Journal:
    """Append-only; `path` gets a line at once for each entry.

    `earlier`: the entries of a study that was cut off, which are used as long as the same is asked again.
    """

    def __init__(self, path: Path) -> None:
        self._lines = Lines(path)
        self.entries: list[Entry] = []
        self.earlier: Sequence[Entry] = ()

    def answer(self, asked: Measure) -> Entry | None:
        """The entry that answers the next question, if there is one."""
        index = asked.index
        if index == len(self.entries) and index < len(self.earlier):
            if _same(self.earlier[index].asked, asked):
                self.add(self.earlier[index])
            else:
                self.earlier = ()  # the study goes another way: the later entries answer other questions
        return self.entries[index] if index < len(self.entries) else None

    def add(self, entry: Entry) -> None:
        """Append. An index that is here already is another node's copy of the same entry, and is ignored."""
        if entry.asked.index != len(self.entries):
            return
        self.entries.append(entry)
        self._lines.add(encode(entry))


def _same(one: Measure, other: Measure) -> bool:
    """Whether both ask for the same measurement, whatever was left, and in whatever start of the script."""
    one, other = (replace(asked, left=None, start=Start(), missed=()) for asked in (one, other))
    return one == other
