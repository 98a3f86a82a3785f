"""All ranks wait for one: it comes late to their collectives, in all steps or in some, or holds up a pipeline."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autoddp.diagnose.collectives.cause import Cause, Job, Suspicion
from autoddp.diagnose.collectives.program import Played, Script, can_be_done, with_
from autoddp.diagnose.collectives.recording import Call, Place, Process
from autoddp.diagnose.collectives.table import waits_for
from autoddp.diagnose.findings import WORTHWHILE
from autoddp.units import duration, milliseconds, percent
from autoddp.wire.replayed_calls import OBJECTS, REST

_MOST_CALLS = 0.6  # of the waiting is for that rank
_OF_OTHERS = 0.5  # of the waiting for it may a rank itself stand in other calls: it may be late because others are
_MOSTLY = 0.5  # of its time the rank computes that holds up a pipeline; it waits as long as the pipeline fills
_AT_ONE_TIME = 1.1  # is the least sum of all ranks' shares of computing, if some of them compute at one time
_UNBALANCED = 1.2  # times as long as the others it computes; more than `_LONGER`, because no replay proves it
_FEWEST = 4  # steps in which a rank comes late
_NEARLY_ALL = 0.8  # of what is waited in such steps is for that rank: other programs slow one and then the other
_REGULAR = 0.1  # spread of the times between such steps, as a share of their mean; 1 where they come at random
_SPANS = 0.5  # of the recording, from the first of them to the last: other programs come and go
_LONGER = 1.05  # times as long as the others; whether that matters, the replay says


class WaitingForRank(Cause):
    in_words = "waiting for a rank that is late"

    def suspect(self, job: Job) -> Iterator[Suspicion]:
        late = [one for one in self._late_to_calls(job) if one.guess >= WORTHWHILE * job.step]
        late = late or [*self._late_in_some_steps(job)]
        yield from late or self._busiest_of_a_pipeline(job)

    def _late_to_calls(self, job: Job) -> Iterator[Suspicion]:
        """The rank that comes last to what all of them call."""
        script = job.script
        if script is None:
            return
        done_again = [{rank: one.call for rank, one in of_ranks.items()} for of_ranks in script.of_key.values()]
        for_whom, waited = _waiting(done_again)
        total = sum(for_whom.values())
        if not total:
            return
        late, seconds = for_whom.most_common(1)[0]
        if seconds < _MOST_CALLS * total:
            return
        # A few steps are done again: where ranks are late by turns, in most of these it may be one of them.
        places = {call.place.of_any_group for calls in done_again for call in calls.values()}
        whole = job.recording.whole.values()
        of_all, _ = _waiting(calls for calls in whole if {call.place.of_any_group for call in calls.values()} & places)
        if not of_all or of_all[late] < _MOST_CALLS * sum(of_all.values()):  # none, where ranks are on other hosts
            return
        if _stands_elsewhere(job.recording.of_rank[late], script.played[late]) >= _OF_OTHERS * seconds:
            return
        gaps = _gaps(script, late)
        if gaps is None:
            return
        before, after, own, others = gaps
        # It may be late by calls of its own, as the leader of a group that meets other leaders first. They stay.
        in_time = _in_time(script, late)
        saved = sum(map(_gap, script.played[late])) - sum(map(_gap, in_time.played[late]))
        waits = min(max(waited.values()), saved) / script.covers * script.pace
        between = f"from {before} to {after}" if before != after else f"between two calls of {after}"
        seen = (
            f"the ranks wait for rank {late} in {seconds / total * 100:.0f} % of their waiting: {between} it takes "
            f"{milliseconds(own)} ms, the others {milliseconds(others)} ms"
        )
        # What it has more of does not vanish where the others take over their part of it.
        divided = percent(1 - 1 / max(2, job.recording.world))
        fix = (
            f"look at what only rank {late} does {between}, or does more of: do it in fewer steps, or after the call, "
            f"or divide it among all ranks, which saves about {divided} of that"
        )
        yield Suspicion(
            self.name,
            seen,
            fix,
            ranks=(late,),
            guess=waits,
            shortens_gaps=True,
            changed=in_time,
            tried=f"rank {late} as quick between its calls as the others",
            lines=(after,),
        )

    def _late_in_some_steps(self, job: Job) -> Iterator[Suspicion]:
        """The rank for which the others wait longer than a step takes, now and then: it evaluates or saves alone.

        What is done again are usual steps, and in these nobody waits for it.
        """
        script = job.script
        if script is None:
            return
        usual = script.seconds / script.covers * script.pace
        waits = [*_waits(job.recording.whole.values())]
        longer = [one for one in waits if one.seconds > usual]
        # A barrier behind an evaluation is waited for so each time, whatever other programs do to other calls.
        made, late_at = Counter(one.place for one in waits), Counter((one.place, one.rank) for one in longer)
        each_time = [one for one in longer if late_at[one.place, one.rank] >= _NEARLY_ALL * made[one.place]]
        of_one = _of_one_rank(longer, waits) or _of_one_rank(each_time, waits)
        if not of_one:
            return
        late, waited = of_one[0].rank, sum(one.seconds for one in of_one)
        process = job.recording.of_rank[late]
        gaps = _between_calls(process, {one.began for one in of_one})
        if sum(gaps.values()) < _OF_OTHERS * waited:  # it is late because it stands in other calls
            return
        before, after = max(gaps, key=lambda lines: gaps[lines])
        between = f"between {before} and {after}" if before != after else f"between two calls of {after}"
        often, divided = len(of_one), percent(1 - 1 / max(2, job.recording.world))
        yield Suspicion(
            self.name,
            f"{often} times in {duration(process.seconds)} the ranks wait {milliseconds(waited / often)} ms for rank "
            f"{late}, which is late {between} then",
            f"look at what only rank {late} does {between} in some steps, such as evaluating or saving: do it less "
            f"often, or in a thread of its own, or divide it among all ranks, which saves about {divided} of that",
            ranks=(late,),
            guess=waited / process.seconds * job.step,
            why_not="only usual steps are done again",
            lines=tuple(dict.fromkeys((before, after))),
        )

    def _busiest_of_a_pipeline(self, job: Job) -> Iterator[Suspicion]:
        """The rank of a pipeline that computes while others wait for what it sends them.

        Who is late to a send cannot be seen: the other one may have come long before. But if several compute at one
        time, and one of them for longer than the others, these wait for it. If they only compute one after another, as
        a pipeline without micro-batches does, it gains nothing to divide the work otherwise.
        """
        of_rank = job.recording.of_rank
        if len(of_rank) < max(2, job.recording.world):
            return
        longest = job.recording.longest.seconds  # a rank that only sends may run ahead, and is through earlier
        busy = {
            rank: (1.0 - one.share_in_calls) * (1.0 - one.waits_in_gaps) * one.seconds / longest
            for rank, one in of_rank.items()
        }
        late = max(busy, key=lambda rank: busy[rank])
        others = [rank for rank in busy if rank != late]
        mean = statistics.fmean(busy[rank] for rank in others)
        if busy[late] < _MOSTLY or sum(busy.values()) < _AT_ONE_TIME or mean * _UNBALANCED > busy[late]:
            return
        stands = [of_rank[rank].share_in_calls for rank in others]
        sends = [_share_of_sends(of_rank[rank]) for rank in others]
        longest_gap = _longest_gap(of_rank[late])
        if sum(sends) < sum(stands) / 2 or longest_gap is None:
            return
        before, after = longest_gap
        seen = (
            f"rank {late} computes for {percent(busy[late])} of the time, the others for {percent(mean)}, and these "
            "wait in sends and receives"
        )
        between = f"between {before} and {after}" if before != after else f"between two calls of {after}"
        fix = f"give the other ranks a part of what rank {late} does {between}, such as some of the model's layers"
        yield Suspicion(
            self.name,
            seen,
            fix,
            ranks=(late,),
            guess=job.step * (busy[late] - statistics.fmean(busy.values())),
            why_not="sends and receives are not done again",
            lines=tuple(dict.fromkeys((before, after))),
        )


def _share_of_sends(process: Process) -> float:
    """Share of its time for which a rank stands in calls that are not done again, such as sends."""
    seconds = sum(one.seconds for place, one in process.sums.items() if place.group and not can_be_done(place))
    return seconds / process.seconds if process.seconds else 0.0


def _longest_gap(process: Process) -> tuple[str, str] | None:
    """The two lines between whose calls a rank spends most of its time; None where it calls hardly anything."""
    gaps = _between_calls(process)
    return max(gaps, key=lambda lines: gaps[lines], default=None)


def _between_calls(process: Process, before: Collection[float] | None = None) -> Counter[tuple[str, str]]:
    """Two lines → seconds of a rank between its calls there; `before`: only before calls that begin at these times."""
    gaps: Counter[tuple[str, str]] = Counter()
    calls = [call for call in process.calls if call.place.group is not None]
    for one, following in pairwise(calls):
        if before is None or following.began in before:
            gaps[one.place.where, following.place.where] += max(0.0, following.began - one.back)  # type: ignore[assignment]
    return gaps


@dataclass(frozen=True)
class _Wait:
    """The longest wait of a rank for another one, in one call."""

    place: Place
    rank: int
    """For which the others wait."""
    seconds: float
    began: float
    """When that rank came."""


def _waits(of_calls: Iterable[dict[int, Call]]) -> Iterator[_Wait]:
    for calls in of_calls:
        if (waits := waits_for(calls)) is not None:
            called = calls[waits[0]]
            yield _Wait(called.place.of_any_group, waits[0], max(waits[1].values()), called.began)


def _of_one_rank(waits: Sequence[_Wait], of_all: Sequence[_Wait]) -> list[_Wait]:
    """The waits for the rank for which nearly all of them are, if it comes late regularly; else []."""
    for_whom: Counter[int] = Counter()
    for one in waits:
        for_whom[one.rank] += one.seconds  # type: ignore[assignment]
    late, waited = for_whom.most_common(1)[0] if for_whom else (-1, 0)
    found = [one for one in waits if one.rank == late]
    if len(found) < _FEWEST or waited < _NEARLY_ALL * sum(for_whom.values()):
        return []
    return found if _come_regularly(*(sorted(one.began for one in those) for those in (found, of_all))) else []


def _come_regularly(late: Sequence[float], of_all: Sequence[float]) -> bool:
    """Whether a rank comes late every n calls or every few seconds, as where the script counts, or looks at the clock.

    Other programs take its core at random. `late`: when the calls began to which it comes late, in seconds, in order;
    `of_all`: the same of all calls.
    """
    them, times = {*late}, [after - before for before, after in pairwise(late)]
    in_time = statistics.pstdev(times) <= _REGULAR * statistics.fmean(times)
    numbers = [number for number, began in enumerate(of_all) if began in them]
    usual = statistics.median_low(after - before for before, after in pairwise(numbers))
    apart = {-2 * usual, -usual, usual, 2 * usual}  # twice where it was in time once
    fit = sum(any(one - other in apart for other in numbers) for one in numbers)
    in_count = fit >= max(_NEARLY_ALL * len(numbers), (numbers[-1] - numbers[0]) / usual / 2)
    return (in_count or in_time) and late[-1] - late[0] >= _SPANS * (of_all[-1] - of_all[0])


def _waiting(of_calls: Iterable[dict[int, Call]]) -> tuple[Counter[int], Counter[int]]:
    """Rank → seconds for which others wait for it; and rank → seconds for which it waits."""
    for_whom: Counter[int] = Counter()
    waited: Counter[int] = Counter()
    known = [(calls, waits) for calls in of_calls if (waits := waits_for(calls)) is not None]
    of_rank: dict[int, list[tuple[float, float, int]]] = {}
    for calls, (late, of_ranks) in known:
        waited.update(of_ranks)
        for rank, seconds in of_ranks.items():
            if seconds > 0 and rank != late:
                of_rank.setdefault(rank, []).append((calls[rank].began, calls[rank].began + seconds, late))
    for waits_of_it in of_rank.values():
        waits_of_it.sort()
    for calls, (late, of_ranks) in known:
        longest = max(of_ranks, key=lambda rank: of_ranks[rank])
        began = calls[longest].began
        for rank, seconds in _for_whom(late, began, began + of_ranks[longest], of_rank, len(of_rank)):
            for_whom[rank] += seconds  # type: ignore[assignment]
    return for_whom, waited


def _for_whom(
    late: int, begin: float, end: float, waits: Mapping[int, Sequence[tuple[float, float, int]]], most: int
) -> Iterator[tuple[int, float]]:
    """The ranks that cause a wait from `begin` to `end` for the rank `late`, each with its seconds of it.

    While that rank itself waits for another one, the other one is the cause: a learner sends new weights late because
    one of its actors is late. `waits`: rank → when it waits, from and to, and for whom. `most`: how many ranks are
    followed in such a chain, which may close.
    """
    own, left = waits.get(late, ()), end - begin
    for since, until, other in own[max(0, bisect_left(own, (begin,)) - 1) : bisect_left(own, (end,))]:
        since, until = max(since, begin), min(until, end)
        if since < until and most:
            left -= until - since
            yield from _for_whom(other, since, until, waits, most - 1)
    yield late, left


def _stands_elsewhere(process: Process, played: Sequence[Played]) -> float:
    """Seconds for which a rank stands in calls that are not done again, such as the sends of a pipeline.

    They are a part of its gaps. The first stage of a pipeline comes last to what all ranks do after the backward pass,
    because it waits for the gradients of the others: it does not do more than they.
    """
    done = {one.call.began for one in played}
    begin, end = played[0].call.began, max(one.call.began for one in played)
    return sum(
        call.seconds
        for call in process.calls
        if call.place.group is not None
        and call.place.collective not in OBJECTS  # whose parts are done again as a whole
        and begin <= call.began <= end
        and call.began not in done
    )


def _gap(one: Played) -> float:
    return one.act.computes + one.act.sleeps


def _gaps(script: Script, late: int) -> tuple[str, str, float, float] | None:
    """Find the two lines between which the late rank loses most, with its seconds there and the others' median."""
    lost: dict[tuple[str, str], list[tuple[float, float]]] = {}
    before = ""
    for one in script.played.get(late, ()):
        others = [_gap(other) for rank, other in script.of_key.get(one.key, {}).items() if rank != late]
        where = one.call.place.where
        if others and before:
            lost.setdefault((before, where), []).append((_gap(one), statistics.median_high(others)))
        before = where
    if not lost:
        return None
    (begin, end), pairs = max(lost.items(), key=lambda one: sum(own - others for own, others in one[1]))
    own, others_ = (statistics.fmean(values) for values in zip(*pairs, strict=True))
    return (begin, end, own, others_) if own > _LONGER * others_ else None


def _in_time(script: Script, late: int) -> Script:
    """The late rank has gaps as short as the usual ones of the others: of two, the longer one.

    A learner may wait for its actors, and has nothing to do where they play.
    """
    usual = {
        key: statistics.median_high(_gap(one) for rank, one in of_ranks.items() if rank != late)
        for key, of_ranks in script.of_key.items()
        if len(of_ranks) > 1
    }
    rests = [_gap(of_rank[-1]) for rank, of_rank in script.played.items() if rank != late and _rests(of_rank)]

    def in_time(one: Played) -> Played:
        gap = _gap(one)
        shorter = statistics.median(rests) if rests and one.act.call == REST else usual.get(one.key, gap)
        if not gap or gap <= shorter:
            return one
        factor = shorter / gap
        return replace(one, act=with_(one.act, computes=one.act.computes * factor, sleeps=one.act.sleeps * factor))

    return replace(script, played={**script.played, late: tuple(map(in_time, script.played[late]))})


def _rests(of_rank: Sequence[Played]) -> bool:
    return bool(of_rank) and of_rank[-1].act.call == REST


CAUSE = WaitingForRank()
