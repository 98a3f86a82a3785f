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


class Journal:
    """Append-only; `path` gets a line at once for each entry.

    `earlier`: the entries of a study that was cut off, which are used as long as the same is asked again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.entries: list[Entry] = []
        self.earlier: Sequence[Entry] = ()
        self._is_whole = True

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
        if not self._is_whole:
            return
        try:
            append(self._path, encode(entry) + "\n")
        except OSError as error:
            # On a full disk the file ends here, and the study goes on.
            self._is_whole = False
            logger.warning("%s ends at entry %d: %s", self._path, entry.asked.index, error.strerror)


def _same(one: Measure, other: Measure) -> bool:
    """Whether both ask for the same measurement, whatever was left, and in whatever start of the script."""
    one, other = (replace(asked, left=None, start=Start(), missed=()) for asked in (one, other))
    return one == other
