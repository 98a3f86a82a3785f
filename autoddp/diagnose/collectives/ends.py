"""Ends of steps in a recording that is still going on: those of optimizers, or of each so many calls.

    ends = StepEnds(folder)
    ends.look()                  # again and again, while the script runs
    ends.of_optimizers()         # {0: [12.01, 12.09, …], 1: […]}: rank → when each step ended

Each look reads only what is new. Where the ring has lost calls between two looks, their steps are lost too.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoddp.wire.recorded_calls import (
    CALL,
    CALLS,
    CALLS_FROM,
    OF_A_CALL,
    Header,
    PlaceNamed,
    ProcessNamed,
    WorldNamed,
    mapped,
    names,
)

_MOST = 2**20  # ends that are kept of a process: a start is over long before
_STEP, _CALL, _NEITHER = range(3)


class StepEnds:
    """What the processes of one start of the script have recorded so far in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[Path, _Process] = {}

    def look(self) -> None:
        """Read what is new."""
        for path in sorted(self._folder.glob("*.calls")):
            with contextlib.suppress(OSError, ValueError):  # it is just being made
                if path not in self._processes:
                    self._processes[path] = _Process(path)
                self._processes[path].look()

    def of_optimizers(self) -> dict[int, Sequence[float]]:
        """Rank → when each step of its optimizers has ended; of several processes of a rank, that with most steps."""
        return self._of_ranks(lambda one: one.steps)

    def of_calls(self, period: int) -> dict[int, Sequence[float]]:
        """Rank → when each `period`-th collective has ended."""
        return self._of_ranks(lambda one: one.calls[period - 1 :: period])

    def _of_ranks(self, ends_of: Any) -> dict[int, Sequence[float]]:
        found: dict[int, Sequence[float]] = {}
        for one in self._processes.values():
            ends = ends_of(one)
            if len(ends) > len(found.get(one.rank, ())):
                found[one.rank] = ends
        return found


class _Process:
    """The recording of one process."""

    def __init__(self, path: Path) -> None:
        self._numbers = mapped(str(path))
        self._names_read = 0
        self._kinds: dict[int, int] = {}
        self._seen = 0
        self.rank = 0
        self.steps, self.calls = array("d"), array("d")

    def look(self) -> None:
        made = int(self._numbers[Header.CALLS_MADE])
        for number in range(max(self._seen, made - CALLS), made):
            at = CALLS_FROM + number % CALLS * OF_A_CALL
            place, _, _, _, returned, _, wait_ended, *_ = self._numbers[at : at + len(CALL)]
            kind = self._kind(int(place))
            ends = self.steps if kind == _STEP else self.calls
            if kind != _NEITHER and len(ends) < _MOST:
                ends.append(wait_ended or returned)
        self._seen = made

    def _kind(self, place: int) -> int:
        if place not in self._kinds:
            self._read_names()
        return self._kinds.setdefault(place, _NEITHER)

    def _read_names(self) -> None:
        begin, self._names_read = self._names_read, int(self._numbers[Header.NAMES])
        for one in names(self._numbers, begin):
            match one:
                case WorldNamed():
                    self.rank = one.rank
                case ProcessNamed():
                    self.rank = one.launched_rank or 0
                case PlaceNamed() if one.method.startswith("step of "):
                    self._kinds[one.place] = _STEP
                case PlaceNamed():
                    self._kinds[one.place] = _CALL if one.group >= 0 else _NEITHER
