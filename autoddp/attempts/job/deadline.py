"""When tuning must be over."""

from __future__ import annotations

import time
from collections.abc import Callable

from autoddp.units import duration

_UNASKED = 300.0  # seconds from the script's first step, where no --budget is given
_SHORTEST = 30.0  # seconds that tuning may take however short the script is
_GRACE = 0.1  # of the whole: the study plans by `left`, so a measurement that has begun before may still end


class Deadline:
    """The deadline for tuning one job, by the clock of its launcher.

        deadline = Deadline(budget=60.0, began=time.monotonic())
        deadline.left                # seconds

    `budget`: seconds from `began`, where the command was given, to the launch of the real job. None: not given; then
    the time counts from the script's first step. `by_length`: without a budget, tuning takes no longer than the script
    has run in the longest start. It is False where the user has said how many trials to run: the script is then started
    as often as they need. `why_over`: the reason when the budget is over, where it is not the one that --budget has
    set.
    """

    def __init__(
        self,
        budget: float | None = None,
        began: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        why_over: str = "",
        by_length: bool = True,
    ) -> None:
        self._budget = budget
        self._why_budget_is_over = why_over
        self._clock = clock
        self._since = None if budget is None else (clock() if began is None else began)
        self._seconds = _UNASKED if budget is None else budget
        self._by_length = by_length and budget is None
        self._script_steps = 0
        self._script_has_ended = False
        self._how_script_ended = ""
        self.ended = ""
        """Why it was moved to now, as by Ctrl-C in a diagnosis; "" where it was not."""

    def stepped(self) -> None:
        """The script has made its first steps; later calls do nothing."""
        if self._since is None:
            self._since = self._clock()

    def script_took(self, seconds: float, steps: int, how: str) -> None:
        """The script has ended by itself, so many seconds after its first step. `how`: in words, for the user.

        An end after fewer steps than in another start says nothing: the script may end early under what was tried.
        `steps`: 0 where the number is not known.
        """
        if not self._by_length or steps < self._script_steps:
            return
        longest = self._seconds if steps == self._script_steps else _UNASKED
        self._script_steps, self._script_has_ended = steps, True
        if max(_SHORTEST, seconds) < longest:
            self._seconds, self._how_script_ended = max(_SHORTEST, seconds), how
        else:
            self._seconds = longest

    @property
    def left(self) -> float | None:
        """Seconds that tuning may still take; negative where it should be over, None before the first step."""
        return None if self._since is None else self._seconds - self.spent

    @property
    def spent(self) -> float:
        """Seconds that tuning has taken so far."""
        return 0.0 if self._since is None else self._clock() - self._since

    @property
    def is_open(self) -> bool:
        """Whether the end of the script will set a limit that is not known yet."""
        return self._by_length and not self._script_has_ended

    @property
    def at_most(self) -> float | None:
        """Seconds until `why_over` ends tuning; None before the first step."""
        return None if self.left is None else self.left + max(1.0, _GRACE * self._seconds)

    @property
    def why_over(self) -> str:
        """Why tuning has to end now; "" as long as it may go on."""
        if self.ended:
            return self.ended
        if self.at_most is None or self.at_most > 0:
            return ""
        if self._budget is not None:
            return self._why_budget_is_over or f"the --budget of {duration(self._budget)} is over"
        took = f"tuning has taken {duration(self._seconds)}"
        if self._seconds < _UNASKED:
            how = f"and a start of the script no longer: {self._how_script_ended}"
            return f"{took}, {how}; --trials N or --budget allows more"
        return f"{took}; --budget allows more"
