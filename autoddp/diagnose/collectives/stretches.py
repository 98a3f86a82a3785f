"""Chooses which part of a recording is done again: usual steps of each rank, whole ones, as many as fit.

stretches = stretches_of(recording, steps, recording.whole)
stretches[rank].begin, stretches[rank].end
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autoddp.diagnose.collectives.recording import Call, Group, Place, Process, Recording
from autoddp.diagnose.collectives.steps import Steps

LONGEST_STEP = 3.0
"""Seconds of a step of which all is done again in one round."""
MOST_CALLS = 3_000
"""Calls of one rank in one round."""
_LONGEST = 0.4  # seconds of the script that are done again in one round; more where one step takes longer
_LATE = 1 / 3  # of the recording: before that autoddp looks at more, and so the script is slower
_FEWEST = 5  # stretches in it; where it has fewer, all count
_PAUSED = 2.0  # times as long as usual takes a stretch with a pause, as for an evaluation
_PAUSE = 0.5  # of the usual stretch takes a step with a pause; and `_PAUSED` times as long as the longest step in that
_OF_EACH = 3.0  # times as long where sets make equally many steps: one that ends first leaves its cores to the others


@dataclass(frozen=True)
class Stretch:
    """A part of the recording of some ranks."""

    begin: float
    end: float
    steps: float = 0.0
    """Steps in it; 0 where they cannot be counted."""
    pace: float = 1.0
    """Seconds that so many steps take on average, without pauses, divided by those of this stretch."""
    rank: int = -1
    """The rank whose steps these are; -1 where they are not known."""

    def has(self, calls: Mapping[int, Call]) -> bool:
        """Whether a call is made in it, as its own rank sees that: another one may be back a moment later.

        Without the last call of a step the stretch would have a step less than is counted.
        """
        if (own := calls.get(self.rank)) is not None:
            return own.began >= self.begin and own.ended <= self.end
        return self.begin <= min(call.began for call in calls.values()) < self.end


def stretches_of(
    recording: Recording, steps: Steps, whole: Mapping[tuple[Group, int], dict[int, Call]]
) -> dict[int, Stretch]:
    """What is done again of each rank that has made one of the calls: some of its steps that take as long as most.

    Ranks that never meet go on at their own pace, and where cores are short one of them may stand still while another
    makes hundreds of calls. So they have stretches of their own: with as many steps each where these are the same, else
    with as many as usually fit.
    """
    length = _length(steps)
    sets = [_Set.of(recording, steps, ranks, whole) for ranks in recording.apart]
    sets = [one for one in sets if one.whole]
    if steps.of_each:  # as long as the ranks take on average
        pace = statistics.fmean(one.of_one for one in sets for _ in one.ranks)
        often = [min(one.often(length, pace) for one in sets)] * len(sets)
    else:
        often = [one.often(length, one.of_one) for one in sets]
    found: dict[int, Stretch] = {}
    for one, count in zip(sets, often, strict=True):
        stretch = one.whole_steps(count, steps) or Stretch(one.end - length, one.end)
        found |= dict.fromkeys(one.ranks, stretch)
    return found


def shown(recording: Recording, steps: Steps) -> Stretch:
    """The part of a recording that a picture of it shows: what is done again of the rank with the longest recording.

    The end of that, where nothing can be done again because other hosts have some of the ranks.
    """
    rank = recording.longest.rank
    found = stretches_of(recording, steps, recording.whole).get(rank)
    end = max((call.ended for call in recording.longest.calls), default=0.0)
    return found or Stretch(end - _length(steps), end, rank=rank)


def _length(steps: Steps) -> float:
    usual = _LONGEST * (_OF_EACH if steps.of_each else 1.0)
    return min(max(usual, 1.2 * steps.seconds if steps.unit != "second" else 0.0), LONGEST_STEP)


@dataclass(frozen=True)
class _Set:
    """Ranks that meet, of which a part of the recording is done again."""

    ranks: frozenset[int]
    process: Process
    """The rank of them that was recorded for the longest time."""
    whole: Sequence[dict[int, Call]]
    """The calls of which there is one of every rank."""
    end: float
    """Until when they make calls of their steps."""
    marks: Sequence[float]
    """When steps end behind which one of these calls is made before the next one ends, while all of them are there."""
    ends: Sequence[float] = ()
    """When any step ends."""

    @classmethod
    def of(
        cls,
        recording: Recording,
        steps: Steps,
        ranks: frozenset[int],
        whole: Mapping[tuple[Group, int], dict[int, Call]],
    ) -> _Set:
        """These ranks of a recording."""
        process = max((recording.of_rank[rank] for rank in ranks), key=lambda one: one.seconds)
        theirs = [calls for calls in whole.values() if min(calls) in ranks]
        if not theirs:
            return cls(ranks, process, (), 0.0, ())
        ends = sorted(max(call.ended for call in calls.values()) for calls in theirs)
        # The last calls may be those behind the loop.
        begin, until = _all_are_there(theirs)
        end = min(ends[-1] if len(ends) < 10 else ends[-1 - len(ends) // 20], until)
        # A call that goes on when a trial of fewer threads begins ends later than the next one that is kept.
        of_steps = sorted(at for at in ends_of_steps(process, steps) if begin <= at <= end)
        called = sorted(calls[process.rank].began for calls in theirs if process.rank in calls)
        before_calls = [
            at for at, following in pairwise(of_steps) if bisect_left(called, at) < bisect_left(called, following)
        ]
        # A pipeline sends in each step, which is not done again, and adds up its losses in every hundredth one.
        marks = of_steps if len(before_calls) >= len(of_steps) - 1 else before_calls
        return cls(ranks, process, theirs, end, marks, of_steps)

    @property
    def of_one(self) -> float:
        """Seconds from one mark to the next: of several steps, where calls come less often than steps. 0: not known."""
        return (self.marks[-1] - self.marks[0]) / (len(self.marks) - 1) if len(self.marks) > 1 else 0.0

    def often(self, length: float, of_one: float) -> int:
        """How many times `of_one` fits into `length` seconds, at least 1; 0 where the steps are not known."""
        known = len(self.marks) - 1
        if known < 1:
            return 0
        first, last = self.marks[0], self.marks[-1]
        calls = sum(call.place.group is not None and first <= call.began <= last for call in self.process.calls)
        fit = min(int(length / max(1e-9, of_one)), int(MOST_CALLS * known / max(1, calls)))
        return min(max(1, fit), known)

    def whole_steps(self, often: int, steps: Steps) -> Stretch | None:
        """The stretch of so many steps; None where nothing is called in them.

        A stretch of few steps that ends in the middle of their calls has more of them, for the gaps that it has, than
        the steps have.
        """
        if not often:
            return None
        marks = self.marks
        each = [(marks[-1 - often - n], marks[-1 - n]) for n in range(0, len(marks) - often, often)]
        late = [one for one in each if one[0] >= marks[-1] - _LATE * (marks[-1] - marks[0])]
        each = late if len(late) >= _FEWEST else each
        first, last = _usual(each)
        there = Stretch(first, last, rank=self.process.rank)
        within = [calls.values() for calls in self.whole if there.has(calls)]
        spans = [(min(call.began for call in calls), max(call.ended for call in calls)) for calls in within]
        # A pause before and behind them may be longer: it is cut.
        if not spans or max(ended for _, ended in spans) - min(began for began, _ in spans) > LONGEST_STEP:
            return None
        place = None if steps.period else steps_at(self.process)
        ends = sorted(call.began for call in self.process.calls if call.place == place) or self.ends
        counts = [bisect_right(ends, end) - bisect_right(ends, begin) if ends else often for begin, end in each]
        count = counts[each.index((first, last))]
        # Of the longest step in a stretch: a pause may be shorter than a stretch of many steps.
        longest = [max(end - begin for begin, end in pairwise(self._marks_in(*one))) for one in each]
        pause = max(_PAUSE * (last - first), _PAUSED * longest[each.index((first, last))])
        kept = [number for number, length in enumerate(longest) if length <= pause]
        pace = _pace([each[number] for number in kept], [counts[number] for number in kept], (last - first) / count)
        return replace(there, steps=count, pace=pace)

    def _marks_in(self, first: float, last: float) -> Sequence[float]:
        return self.marks[bisect_left(self.marks, first) : bisect_right(self.marks, last)]


def _usual(stretches: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The one of median length: where others use the machine too, the steps of some seconds take much longer."""
    by_length = sorted(stretches, key=lambda one: one[1] - one[0])
    return by_length[(len(by_length) - 1) // 2]


def _pace(stretches: Sequence[tuple[float, float]], counts: Sequence[int], usual: float) -> float:
    """How long a step takes on average as a multiple of `usual`, the seconds of one in the usual stretch.

    A script takes as long as its steps do on average, and most of them take less than that. Stretches that have a pause
    are left out. `counts`: the steps of each. Where calls come at odd steps, some have more than others.
    """
    kept = [
        (last - first, count)
        for (first, last), count in zip(stretches, counts, strict=True)
        if last - first <= _PAUSED * usual * count
    ]
    return sum(length for length, _ in kept) / sum(count for _, count in kept) / usual if usual and kept else 1.0


def steps_at(process: Process) -> Place | None:
    """The place of the optimizer that steps most often; None without one."""
    counts = Counter(call.place for call in process.calls if call.place.is_step)
    return counts.most_common(1)[0][0] if counts else None


def ends_of_steps(process: Process, steps: Steps) -> list[float]:
    """When steps of a rank end: where its optimizer steps, else in the longest gap between calls that repeat."""
    if not steps.period and (place := steps_at(process)) is not None:
        return _before_calls(process, place)
    calls = [call for call in process.calls if call.place.repeats_in_steps]
    if not steps.period or len(calls) < 2:
        return []
    # Where nothing is open: a call that is waited for behind such a place would be left out of all of its steps.
    gaps = [(before.ended + after.began) / 2 for before, after in pairwise(calls)]
    lengths = [max(0.0, after.began - before.ended) for before, after in pairwise(calls)]
    longest = max(range(min(steps.period, len(gaps))), key=lambda first: sum(lengths[first :: steps.period]))
    return gaps[longest :: steps.period]


def _before_calls(process: Process, step: Place) -> list[float]:
    """When steps of that optimizer end, of those behind which something is called before the next one ends.

    A script may call only in every hundredth step: then a hundred of them are what its calls count for.
    """
    found: list[float] = []
    at = 0.0
    for call in process.calls:
        if call.place == step:
            at = call.began
        elif at and call.place.group is not None:
            found.append(at)
            at = 0.0
    return found


def _all_are_there(calls: Iterable[dict[int, Call]]) -> tuple[float, float]:
    """When the last rank has made its first call, and the first rank its last one.

    It is of the ranks that call as often as others: pairs end apart. Some ranks may have lost more of their calls.
    """
    of_ranks: dict[int, list[Call]] = {}
    for of_call in calls:
        for rank, call in of_call.items():
            of_ranks.setdefault(rank, []).append(call)
    usual = statistics.median(map(len, of_ranks.values()))
    often = [of_rank for of_rank in of_ranks.values() if 2 * len(of_rank) >= usual]
    first = max(min(call.began for call in of_rank) for of_rank in often)
    return first, min(max(call.ended for call in of_rank) for of_rank in often)
