"""What a start of a script without DDP has shown so far: numbers that its ranks print, or the ends of their steps.

    progress = PrintedNumbers(objective, folder_of_the_attempt)
    progress.look()                     # again and again, while the script runs, and once after its end
    progress.counts                     # {0: 12, 1: 12}: rank → numbers
    progress.cost({0: 10, 1: 10})       # what the first ten of each rank amount to

All starts are compared by the same count: a script may be slower at first, or later in its training. Of several ranks
the one with the highest cost counts, because the others may be as fast only by waiting less for it.
"""

from __future__ import annotations

import codecs
import contextlib
import math
import re
import signal
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autoddp.diagnose.collectives import recorded
from autoddp.diagnose.collectives.ends import StepEnds
from autoddp.diagnose.collectives.steps import steps_of
from autoddp.runs.folder import CALLS
from autoddp.settings import Objective
from autoddp.timing import median

_LEAST_WINDOW = 5.0  # seconds for which the first start is measured, and as long as it took to its first number
_MATCHING = 5.0  # seconds for finding the numbers in what was printed since the last look
_LONGEST_LINE = 2**16  # characters; of a longer line only the end is searched
_LINE_ENDS = re.compile("[\r\n]+")  # a progress bar writes over its own line
_SHOWN = 40  # characters of what a pattern has found
_WARM_UP = 4  # the first of so many parts of the steps is not measured
_WITHOUT_OPTIMIZER = 20.0  # seconds from the first call in which an optimizer has not stepped: there may be none
_IN_MOST_LOOKS = 20  # looks in which calls were made meanwhile; there are two in a second
_RANKS_THAT_STEP = 0.5  # share of the most steps of a rank that another one must have to be measured at all


class Unusable(Exception):
    """What the script shows is no number that starts could be compared by; the text says why."""


class Progress(ABC):
    """One start of the script."""

    fewest: int
    """Numbers or steps of each rank that are waited for in the first start."""
    least: int
    """Numbers or steps without which there is no cost."""
    what: str
    """What is counted, in words for a line such as "12 steps so far"."""

    @abstractmethod
    def look(self) -> None:
        """Take in what is new. Unusable."""

    @property
    @abstractmethod
    def counts(self) -> Mapping[int, int]:
        """Rank → how many numbers or steps it has shown; a rank that shows none is absent."""

    @abstractmethod
    def cost(self, counts: Mapping[int, int]) -> float:
        """What the first so many of each rank amount to, or as many as there are. Unusable."""

    def began(self, now: float) -> float:
        """When the first one was shown, by `time.monotonic`; `now` where that is not known. There is one."""
        return now

    def counts_until(self, at: float) -> Mapping[int, int]:
        """`counts` at an earlier time, but `fewest` at least; those of now where that is not known."""
        return dict(self.counts)

    @abstractmethod
    def ends(self) -> None:
        """The script has ended by itself: what is there has to be enough. Unusable where it cannot be."""


class PrintedNumbers(Progress):
    """Numbers that the ranks print, to standard output or standard error. The median of each rank's counts."""

    fewest, least, what = 3, 1, "numbers"

    def __init__(self, objective: Objective, place: Path) -> None:
        self._objective = objective
        self._place = place
        self._logs: dict[Path, _Log] = {}
        self._found: dict[int, list[str]] = {}

    def look(self) -> None:
        """See `Progress`."""
        for path in sorted(self._place.glob("*/attempt_0/*/std*.log")):
            log = self._logs.setdefault(path, _Log(path))
            self._search(path, *log.lines())

    def _search(self, path: Path, *lines: str) -> None:
        try:
            with _at_most(_MATCHING):
                for line in lines:
                    for match in self._objective.pattern.finditer(line):
                        self._found.setdefault(int(path.parent.name), []).append(match[1] or "")
        except TimeoutError:
            why = f"it takes longer than {_MATCHING:.0f} s to find {self._objective.text} in what the script prints"
            raise Unusable(f"{why}: write a simpler pattern, or print less") from None

    @property
    def counts(self) -> Mapping[int, int]:
        """See `Progress`."""
        return {rank: len(found) for rank, found in self._found.items()}

    def ends(self) -> None:
        """See `Progress`."""
        for path, log in self._logs.items():
            self._search(path, log.rest())
        if not self._found:
            raise Unusable(f"the script has ended, and has printed nothing that {self._objective.text} finds")

    def cost(self, counts: Mapping[int, int]) -> float:
        """See `Progress`."""
        return max(self._of_rank(rank, self._found.get(rank, ())[:count]) for rank, count in counts.items())

    def _of_rank(self, rank: int, found: Sequence[str]) -> float:
        if not found:
            raise Unusable(f"rank {rank} has printed nothing that {self._objective.text} finds")
        try:
            numbers = [float(text) for text in found]
        except ValueError:
            wrong = next(text for text in found if not _is_number(text))
            raise Unusable(f"rank {rank} prints {_shown(wrong)} where {self._objective.text} wants a number") from None
        if not all(map(math.isfinite, numbers)):
            wrong = next(text for text in found if not math.isfinite(float(text)))
            raise Unusable(f"rank {rank} prints {_shown(wrong)}, which cannot be compared")
        try:
            return self._objective.cost(median(numbers))
        except ValueError as error:
            raise Unusable(f"rank {rank} prints {error}") from None


class _Log:
    """A log that grows: its lines that have ended since the last look, and in the end the one that has not."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._text = codecs.getincrementaldecoder("utf-8")("replace")  # a look may end within a letter
        self._rest = ""

    def lines(self) -> Iterator[str]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)  # of a log that was made shorter meanwhile there is nothing new
                new = file.read()
        except OSError:
            return
        self._read += len(new)
        *lines, rest = _LINE_ENDS.split(self._rest + self._text.decode(new.replace(b"\0", b"")))
        self._rest = rest[-_LONGEST_LINE:]
        yield from (line[-_LONGEST_LINE:] for line in lines)

    def rest(self) -> str:
        rest, self._rest = self._rest, ""
        return rest


def _is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        float(text)
        return True
    return False


def _shown(text: str) -> str:
    return repr(text[:_SHOWN])


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """TimeoutError in the body after so many seconds. A search by a regular expression may take years, and heeds it.

    For the main thread only. An alarm that was set before goes on: one that a program has set lives on in the next one.
    """

    def late(*_: object) -> None:
        raise TimeoutError

    began, before = time.monotonic(), signal.signal(signal.SIGALRM, late)
    theirs, again = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if theirs:
            left = theirs - (time.monotonic() - began)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3), again)


class StepsMade(Progress):
    """Steps of optimizers; where there is no optimizer, the calls of collectives after which they repeat.

    `period`: calls of a step, as the first start has shown; 0 for steps of optimizers; None where it is not known yet.
    """

    fewest, least, what = 8, 4, "steps"

    def __init__(self, place: Path, period: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = place / CALLS
        self._recorded = StepEnds(self._folder)
        self._clock = clock
        self._calls, self._active = 0, 0
        self.period = period
        self.how = ""
        """How the steps were found, where there is no optimizer."""

    def look(self) -> None:
        """See `Progress`."""
        self._recorded.look()
        if self.period is None and self._recorded.of_optimizers():
            self.period = 0
        if self.period is None and self._has_no_optimizer():
            self._find_period()

    def _has_no_optimizer(self) -> bool:
        """Whether so many calls were made without a step that none is to be expected.

        A script that builds its model only after some minutes may meet at a barrier before.
        """
        calls = self._recorded.of_calls(1)
        made = sum(map(len, calls.values()))
        self._active += made > self._calls
        self._calls = made
        if self._active < _IN_MOST_LOOKS:
            return False
        return self._clock() - min(ends[0] for ends in calls.values()) >= _WITHOUT_OPTIMIZER

    def ends(self) -> None:
        """See `Progress`."""
        if self.period is None:
            self._find_period()

    def _find_period(self) -> None:
        recording = recorded(self._folder)
        if not recording.is_there:
            raise Unusable("no optimizer steps, and no collective of torch.distributed is called")
        found = steps_of(recording)
        if not found.period:
            raise Unusable(f"{found.how}: there is nothing to count")
        self.period, self.how = found.period, found.how

    @property
    def _ends(self) -> dict[int, Sequence[float]]:
        if self.period is None:
            return {}
        found = self._recorded.of_calls(self.period) if self.period else self._recorded.of_optimizers()
        most = max(map(len, found.values()), default=0)
        return {rank: ends for rank, ends in found.items() if len(ends) >= most * _RANKS_THAT_STEP and len(ends)}

    @property
    def counts(self) -> Mapping[int, int]:
        """See `Progress`."""
        return {rank: len(ends) for rank, ends in self._ends.items()}

    def began(self, now: float) -> float:
        """See `Progress`."""
        return min((ends[0] for ends in self._ends.values()), default=now)

    def counts_until(self, at: float) -> Mapping[int, int]:
        """See `Progress`."""
        return {rank: max(bisect_right(ends, at), min(len(ends), self.fewest)) for rank, ends in self._ends.items()}

    def cost(self, counts: Mapping[int, int]) -> float:
        """See `Progress`. The mean of the steps behind the first quarter, pauses between them included."""
        found = self._ends
        return max(_mean_step(found.get(rank, ())[:count]) for rank, count in counts.items())


def _mean_step(ends: Sequence[float]) -> float:
    if len(ends) < StepsMade.least:
        raise Unusable(f"a rank has made {len(ends)} steps, and {StepsMade.least} are needed")
    first = len(ends) // _WARM_UP
    return max((ends[-1] - ends[first]) / (len(ends) - 1 - first), 1e-9)


@dataclass
class FirstStart:
    """When the first start of the script has shown enough: `needed` is then what each other start has to show.

    It is measured for as long as it took to its first number, and for five seconds at least; for `longest` seconds at
    most, if there are few numbers. `as_before`: what the first start of a run has shown that was cut off. This one is
    measured by the same, if it comes so far.
    """

    progress: Progress
    longest: float
    as_before: Mapping[int, int] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    _began: float = field(init=False)
    _first_at: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()

    @property
    def has_begun(self) -> bool:
        """Whether there is a number."""
        return self._first_at is not None

    @property
    def needed(self) -> Mapping[int, int]:
        """Rank → numbers. Unusable where there are none."""
        return self.as_before if self._is_as_before else self.progress.counts_until(self._until)

    @property
    def _is_as_before(self) -> bool:
        counts = self.progress.counts
        return counts.keys() == self.as_before.keys() and is_reached(self.as_before, counts)

    @property
    def _until(self) -> float:
        assert self._first_at is not None
        return self._first_at + max(_LEAST_WINDOW, self._first_at - self._began)

    def is_over(self) -> bool:
        """Whether no more has to be seen; asked after each look."""
        counts, now = self.progress.counts, self.clock()
        if not counts:
            return False
        if self._first_at is None:
            self._first_at = self.progress.began(now)
        if now < self._until:
            return False
        if now - self._first_at > self.longest:
            return min(counts.values()) >= self.progress.least
        return min(counts.values()) >= self.progress.fewest and is_reached(self.as_before, counts)


def is_reached(needed: Mapping[int, int], counts: Mapping[int, int]) -> bool:
    """Whether each rank has shown as much as in the first start."""
    return all(counts.get(rank, 0) >= count for rank, count in needed.items())
