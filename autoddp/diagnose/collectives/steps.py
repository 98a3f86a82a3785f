"""Finds where a step of a script ends that calls collectives by itself: at an optimizer, or where its calls repeat."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoddp.diagnose.collectives.recording import Call, Place, Process, Recording

_LONGEST = 512  # calls of one step
_REPEATS = 4  # times that a period must repeat to be one
_LOOKED_AT = 8_192  # calls, the last ones


@dataclass(frozen=True)
class Steps:
    """What prices count for."""

    unit: str
    """The word for one: "step", "call" where only one call repeats, or "second" where nothing does."""
    how: str
    """How it was found, as the end of a sentence."""
    seconds: float
    """Seconds of one, on the rank that was recorded for the longest time; see `of_each`."""
    period: int = 0
    """Calls of one step on that rank; 0 where nothing repeats, or an optimizer ends the step."""
    of_each: bool = False
    """Whether sets of ranks that never meet make the same steps. Then `seconds` is the mean of all sets: where these
    share cores, a step of one takes three times as long as that of another for many seconds."""


def steps_of(recording: Recording) -> Steps:
    """The step of a recorded script."""
    first = recording.longest
    found = _steps_of(first)
    sets = [[recording.of_rank[rank] for rank in ranks] for ranks in recording.apart if first.rank not in ranks]
    if found.unit == "second" or not sets:
        return found
    others = [max(of_set, key=lambda one: one.seconds) for of_set in sets]
    each = [found, *map(_steps_of, others)]
    if any(_lines(one) != _lines(first) for one in others) or {(one.unit, one.period) for one in each} != {
        (found.unit, found.period)
    }:
        return found
    return replace(found, seconds=statistics.fmean(one.seconds for one in each), of_each=True)


def _lines(process: Process) -> set[tuple[str, int, str]]:
    return {(call.place.file, call.place.line, call.place.method) for call in process.calls}


def _steps_of(process: Process) -> Steps:
    by_optimizer = _of_an_optimizer(process)
    if by_optimizer is not None:
        return by_optimizer
    period = period_of(process.calls)
    if period:
        calls = [call for call in process.calls if call.place.repeats_in_steps]
        seconds = (calls[-1].ended - calls[0].began) / len(calls) * period
        if period == 1:
            return Steps("call", "one call after another, and no optimizer", seconds, period)
        return Steps("step", f"the calls repeat after {period}", seconds, period)
    return Steps("second", "no optimizer steps, and the calls do not repeat", 1.0)


def _of_an_optimizer(process: Process) -> Steps | None:
    """Steps of the optimizer that steps most often, if it does so more than once."""
    counts = Counter({place: sums.count for place, sums in process.sums.items() if place.is_step})
    if not counts:
        return None
    place, count = counts.most_common(1)[0]
    ends = [call.began for call in process.calls if call.place == place]
    if len(ends) < 2:
        return None
    name = place.method.removeprefix("step of ")
    return Steps("step", f"{count} steps of {name} ({place.where})", (ends[-1] - ends[0]) / (len(ends) - 1))


def period_of(calls: Sequence[Call]) -> int:
    """The smallest number of calls after which the same places follow, in half of a recording; 0 for none.

    The last calls may be those behind the loop. So the end of the sequence may be left out, up to a fifth.
    """
    numbers: dict[Place, int] = {}
    places = [call.place for call in calls[-_LOOKED_AT:] if call.place.repeats_in_steps]
    alike = {place: place.of_any_group for place in set(places)}
    made = [numbers.setdefault(alike[place], len(numbers)) for place in places]
    for cut in sorted({0, 1, 2, 4, 8, len(made) // 10, len(made) // 5}):
        sequence = made[: len(made) - cut]
        for period in range(1, min(_LONGEST, len(sequence) // _REPEATS) + 1):
            last = sequence[-max(period * _REPEATS, len(sequence) // 2) :]
            if last[:-period] == last[period:]:
                return period
    return 0
