"""Whether ranks with fewer threads would be faster: tried in the running script, in turns, for some seconds.

    trial = planned(recording, cores, now)      # while the script runs; None where there is no reason
    before, after = found(recording)            # seconds of a step in each pair of turns

What a rank computes between its calls cannot be done again by other processes as it was. But its threads can be set
while it runs: its calls stay what they are. The processes of a host read one clock, so they take turns without a word.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from autoddp.diagnose.collectives.recording import Call, Recording
from autoddp.diagnose.collectives.steps import steps_of
from autoddp.wire.recorded_calls import ThreadsTrial

_UNTIL_ALL_KNOW = 1.5  # seconds: each process looks for a trial after one
_TURN, _LONGEST_TURN = 0.5, 1.0  # seconds
_STEPS = 8  # of a turn, if it would not be too long
_ALL_TURNS = 12.0  # seconds: on a busy machine half of that does not tell a gain of a tenth
_FEWEST_PAIRS = 4


def planned(recording: Recording, cores: int, now: float) -> ThreadsTrial | None:
    """The turns, if the ranks of this job together have more threads than cores. `now` is by the recording's clock."""
    ranks = len(recording.of_rank)
    if not recording.is_there or ranks < recording.world:
        return None
    threads, fewer = max(one.threads for one in recording.processes), max(1, cores // ranks)
    if threads <= fewer:
        return None
    turn = min(max(_TURN, _STEPS * steps_of(recording).seconds), _LONGEST_TURN)
    return ThreadsTrial(fewer, now + _UNTIL_ALL_KNOW, turn, int(_ALL_TURNS / turn))


def found(recording: Recording) -> tuple[list[float], list[float]] | None:
    """Seconds from one step or call to the next, as written and with fewer threads, in pairs of turns that follow.

    None where there was no trial, or too little of it.
    """
    trial = recording.trial
    if trial is None:
        return None
    of_rank = max((one.tried for one in recording.of_rank.values()), key=len, default=())
    before: list[float] = []
    after: list[float] = []
    marks = _marks(of_rank)
    turns = [_apart([at for at in marks if trial.turn_at(at) == turn]) for turn in range(trial.turns)]
    for first in range(0, trial.turns - 1, 2):
        pair = {trial.has_fewer(turn): turns[turn] for turn in (first, first + 1)}
        as_written, fewer = pair[False], pair[True]
        if as_written and fewer:
            before.append(as_written)
            after.append(fewer)
    return (before, after) if len(before) >= _FEWEST_PAIRS else None


def _marks(calls: Sequence[Call]) -> list[float]:
    """When the steps of the optimizer ended; else when the place was called that is called most often."""
    steps = [call for call in calls if call.place.is_step] or calls
    counts = Counter(call.place.of_any_group for call in steps if call.place.repeats_in_steps)
    most = counts.most_common(1)[0][0] if counts else None
    return [call.began for call in steps if call.place.of_any_group == most]


def _apart(marks: Sequence[float]) -> float:
    """The mean distance of the marks of a turn, without the first, before which threads were set; 0 if they are few."""
    return statistics.fmean(b - a for a, b in pairwise(marks[1:])) if len(marks) >= 3 else 0.0
