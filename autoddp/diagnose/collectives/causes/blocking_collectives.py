"""The script waits for a collective whose result it uses only later."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from autoddp.diagnose.collectives.cause import Cause, Job, Suspicion
from autoddp.diagnose.collectives.merging import places_of, seconds_in
from autoddp.diagnose.collectives.program import NO_CALL, Played, Script, rest, with_
from autoddp.diagnose.collectives.recording import Call, Place, Process, Use
from autoddp.units import milliseconds
from autoddp.wire.recorded_calls import LAST_NTH
from autoddp.wire.replayed_calls import REST, WAIT, Act

_LONG = 0.2  # of a call, from which what comes after it could hide a part of it


class BlockingCollectives(Cause):
    in_words = "waiting for a result that is needed later"

    def suspect(self, job: Job) -> Iterator[Suspicion]:
        script, uses = job.script, _first_uses(job)
        if script is None or not uses:
            return
        waits = {
            rank: list(_waits(job.recording.of_rank[rank], of_rank, uses)) for rank, of_rank in script.played.items()
        }
        keys = _used_later(script, waits)
        if not keys:
            return
        lines = places_of(script, keys)
        changed = (one.call.place for of_rank in script.played.values() for one in of_rank if one.key in keys)
        took, what = seconds_in(script, keys), next(one for one in changed if one.where == lines[0]).as_function
        waited = [wait for of_rank in waits.values() for wait in of_rank if wait.key in keys]
        used = {line: sorted({wait.use for wait in waited if wait.call.place.where == line}) for line in lines}
        before = {line: _listed(use.where for use in of_it) for line, of_it in used.items()}
        scaled = {line: _listed(use.scaled for use in of_it) for line, of_it in used.items()}
        seen = (
            f"{lines[0]} waits {milliseconds(took)} ms of each {job.steps.unit} for {what}, and what it changes is "
            f"used in {before[lines[0]]} first"
        )
        # The watch has seen a few steps, and no code that reads memory past torch.
        is_started = not any(
            wait.call.is_blocking and not wait.call.at_once for wait in waited if wait.call.place.where == lines[0]
        )
        how = f"work = dist.{what}(…, async_op=True), and work.wait()"
        later = (
            f"{'it has async_op=True: move its work.wait() to stand' if is_started else how} before "
            f"{before[lines[0]]}, and before any line above it that reads the result in some steps only, in another "
            "thread, or past torch (numpy, C++)"
        )
        if scaled[lines[0]]:
            later += f"; move what {scaled[lines[0]]} does to the result behind work.wait(), too"
        for line in lines[1:]:
            later += f"; and so {line}, before {before[line]}"
            if scaled[line]:
                later += f", with what {scaled[line]} does behind the wait"
        yield Suspicion(
            self.name,
            seen,
            f"{lines[0]}: let it run meanwhile: {later}",
            guess=took,
            changed=_waited_for_later(script, keys, waits),
            tried="async_op=True, and the wait before the first use",
            lines=lines,
        )


def _listed(lines: Iterable[str]) -> str:
    """All of the lines, each once: what a helper's line changes may be used in several others of a step."""
    return " and ".join(dict.fromkeys(line for line in lines if line))


def _first_uses(job: Job) -> dict[tuple[Place, int], Use]:
    """Place, and which of its calls in a step → the first use of its result.

    It is the earliest over all ranks that call it. All of them must have seen one. None may call it in the steps: it
    may belong to the start, to a trial of fewer threads, or to a world beside that of the ranks. If on one of them
    nothing uses it but the next call of the same line, it may be read where nobody sees it, by numpy or C++: then
    nothing is known. It is so where only the root of a broadcast is seen to use what it has sent.
    """
    found: dict[tuple[Place, int], Use] = {}
    for which in {which for one in job.recording.of_rank.values() for which in one.uses}:
        callers = [one for one in job.recording.of_rank.values() if which[0] in one.sums]
        if callers and all(which in one.uses for one in callers):
            uses = [one.uses[which] for one in callers]
            if all(use.where != which[0].where for use in uses):
                found[which] = min(uses)
    return found


def _nth_of(process: Process) -> dict[tuple[Place, float], int]:
    """Place and time of each call → `UsedNamed.nth`. What comes before the first step is not there."""
    found: dict[tuple[Place, float], int] = {}
    counts: Counter[Place] | None = None
    for call in process.calls:
        if call.place.is_step:
            counts = Counter()
        elif counts is not None and call.place.group is not None:
            found[call.place, call.began] = min(counts[call.place], LAST_NTH)
            counts[call.place] += 1
    return found


@dataclass(frozen=True)
class _Wait:
    """A wait of a rank: it is in the call itself, or comes later for one that was only started."""

    number: int
    """Place in what the rank does."""
    key: tuple[int, int]
    call: Call
    used: int
    """Place of what comes after the first use; as many as there are where nothing does."""
    use: Use


def _waits(process: Process, played: Sequence[Played], uses: dict[tuple[Place, int], Use]) -> Iterator[_Wait]:
    """Each wait of a rank for a result of which the first use is known.

    `Use.calls` counts what was recorded. Not all of that is done again: no sends, for example, and of a function for
    objects only the whole; and groups that are made do not count. So the time tells which act comes after the use.
    """
    keys = {id(one.call): one.key for one in played if one.key != NO_CALL}
    counted = sorted(at for call in process.calls if call.place.group is not None for at in _counted(call))
    begins = [began for began, _ in counted]
    over = [_over(one) for one in played]
    nth = _nth_of(process)
    for number, one in enumerate(played):
        place = one.call.place
        use = uses.get((place, nth.get((place, one.call.began), -1))) or uses.get((place, -1))
        is_wait = (one.key != NO_CALL and one.act.waits) or one.act.call == WAIT
        if use is None or not is_wait or "object" in one.call.place.collective:
            continue
        following = bisect_left(begins, one.call.ended) + use.calls
        used = len(played)
        if following < len(counted):
            before = counted[following - 1][1] if use.calls else one.call.ended
            used = max(number + 1, bisect_right(over, before + use.share * max(0.0, begins[following] - before)))
        yield _Wait(number, keys.get(id(one.call), NO_CALL), one.call, used, use)


def _counted(call: Call) -> Iterator[tuple[float, float]]:
    """When what `Use.calls` counts began and was over: the call, and the wait for one that was only started."""
    yield call.began, call.back
    if call.wait_ended and (call.at_once or not call.is_blocking):
        yield call.wait_began, call.wait_ended


def _over(one: Played) -> float:
    """When a rank is through with it. Behind a `rest` comes what its call is."""
    if one.act.call == REST:
        return math.nextafter(one.call.began, math.inf)
    return one.call.ended if one.act.call == WAIT else one.call.back


def _used_later(script: Script, waits: dict[int, list[_Wait]]) -> set[tuple[int, int]]:
    """The calls for which every rank waits, and then does something for a while that needs no result of them."""
    found: dict[tuple[int, int], list[bool]] = {}
    for rank, of_rank in script.played.items():
        for wait in waits[rank]:
            meanwhile = of_rank[wait.number + 1 : wait.used]
            free = sum(after.act.computes + after.act.sleeps + after.call.seconds for after in meanwhile)
            if wait.used < len(of_rank):
                last = of_rank[wait.used].act
                free += wait.use.share * (last.computes + last.sleeps)
            found.setdefault(wait.key, []).append(free >= _LONG * wait.call.seconds)
    found.pop(NO_CALL, None)
    return {key for key, holds in found.items() if all(holds) and len(holds) == len(script.of_key[key])}


def _waited_for_later(script: Script, keys: set[tuple[int, int]], waits: dict[int, list[_Wait]]) -> Script:
    def change(played: Sequence[Played], of_rank: Sequence[_Wait]) -> Iterator[Played]:
        moved = {wait.number: wait for wait in of_rank if wait.key in keys}
        later: dict[int, list[_Wait]] = {}
        computes = sleeps = 0.0
        for number, one in enumerate(played):
            computes, sleeps, left = computes + one.act.computes, sleeps + one.act.sleeps, 1.0
            for wait in sorted(later.pop(number, []), key=lambda wait: wait.use.share):
                part = wait.use.share - (1.0 - left)
                yield Played(Act(WAIT, computes=computes * part, sleeps=sleeps * part), NO_CALL, wait.call)
                left -= part
            act = with_(one.act, computes=computes * left, sleeps=sleeps * left)
            if number in moved:
                later.setdefault(moved[number].used, []).append(moved[number])
                if act.call == WAIT:  # what the rank does before it, it does before the next one
                    computes, sleeps = act.computes, act.sleeps
                    continue
                act = with_(act, waits=False)
            computes = sleeps = 0.0
            yield Played(act, one.key, one.call)
        if played:
            yield from rest(computes, sleeps, played[-1])

    return replace(script, played={rank: tuple(change(played, waits[rank])) for rank, played in script.played.items()})


CAUSE = BlockingCollectives()
