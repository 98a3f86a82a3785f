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
_ALIKE = 2.0  # times as many bytes on average: objects, and batches of texts, are not all of one size


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
    """Whether sets of ranks that never meet make the same steps. Then `seconds` is the mean of all ranks: where these
    share cores, a step of one takes three times as long as that of another for many seconds."""


def steps_of(recording: Recording) -> Steps:
    """The step of a recorded script."""
    first = recording.longest
    found = _steps_of(first)
    sets = recording.apart
    if found.unit == "second" or len(sets) < 2:
        return found
    longest = [max((recording.of_rank[rank] for rank in ranks), key=lambda one: one.seconds) for ranks in sets]
    each = [_steps_of(one) for one in longest]
    are_alike = all(_are_alike(one, first) for one in longest)
    if not are_alike or {(one.unit, one.period) for one in each} != {(found.unit, found.period)}:
        return found
    of_ranks = (one.seconds for one, ranks in zip(each, sets, strict=True) for _ in ranks)
    return replace(found, seconds=statistics.fmean(of_ranks), of_each=True)


def _are_alike(one: Process, other: Process) -> bool:
    """Whether the same lines of both call the same, with about as many bytes: else one of them is slower for good."""
    mine, theirs = _bytes(one), _bytes(other)
    return mine.keys() == theirs.keys() and all(
        max(mine[line], theirs[line]) <= _ALIKE * min(mine[line], theirs[line]) for line in mine
    )


def _bytes(process: Process) -> dict[tuple[str, int, str], float]:
    """Mean bytes of the calls of each line."""
    of_lines: dict[tuple[str, int, str], list[int]] = {}
    for call in process.calls:
        of_lines.setdefault((call.place.file, call.place.line, call.place.method), []).append(call.bytes)
    return {line: statistics.fmean(sizes) for line, sizes in of_lines.items()}


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
