"""The script waits for a collective whose result it uses only later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoddp.diagnose.collectives.cause import Cause, Job, Suspicion
from autoddp.diagnose.collectives.merging import places_of, seconds_in
from autoddp.diagnose.collectives.program import NO_CALL, Played, Script, rest, with_
from autoddp.diagnose.collectives.recording import Call, Place, Use
from autoddp.units import milliseconds
from autoddp.wire.replayed_calls import WAIT, Act

_LONG = 0.2  # of a call, from which what comes after it could hide a part of it


class BlockingCollectives(Cause):
    in_words = "waiting for a result that is needed later"

    def suspect(self, job: Job) -> Iterator[Suspicion]:
        script, uses = job.script, _first_uses(job)
        if script is None or not uses:
            return
        keys = _used_later(script, uses)
        if not keys:
            return
        lines = places_of(script, keys)
        first = next(one for of_rank in script.played.values() for one in of_rank if one.key in keys)
        took, what, use = seconds_in(script, keys), first.call.place.collective, uses[first.call.place]
        seen = (
            f"{lines[0]} waits {milliseconds(took)} ms of each {job.steps.unit} for {what}, and what it changes is "
            f"used in {use.where} first"
        )
        later = f"work = dist.{what}(…, async_op=True), and work.wait() before {use.where}"
        yield Suspicion(
            self.name,
            seen,
            f"{lines[0]}: let it run meanwhile: {later}",
            guess=took,
            changed=_waited_for_later(script, keys, uses),
            tried="async_op=True, and the wait before the first use",
            lines=lines,
        )


def _first_uses(job: Job) -> dict[Place, Use]:
    """Place → the first use of its result, the earliest over all ranks that call it. All of them must have seen one."""
    found: dict[Place, Use] = {}
    for place in {place for one in job.recording.processes for place in one.uses}:
        callers = [one for one in job.recording.of_rank.values() if place in one.sums]
        if all(place in one.uses for one in callers):
            found[place] = min(one.uses[place] for one in callers)
    return found


def _waits(played: Sequence[Played]) -> Iterator[tuple[int, tuple[int, int], Call]]:
    """Each wait of a rank, with its call: it is in the call itself, or comes later for one that was only started."""
    keys = {id(one.call): one.key for one in played if one.key != NO_CALL}
    for number, one in enumerate(played):
        if (one.key != NO_CALL and one.act.waits) or one.act.call == WAIT:
            yield number, keys.get(id(one.call), NO_CALL), one.call


def _used_later(script: Script, uses: dict[Place, Use]) -> set[tuple[int, int]]:
    """The calls for which every rank waits, and then does something for a while that needs no result of them."""
    found: dict[tuple[int, int], list[bool]] = {}
    for of_rank in script.played.values():
        for number, key, call in _waits(of_rank):
            use = uses.get(call.place)
            if use is None or "object" in call.place.collective:
                continue
            meanwhile = of_rank[number + 1 : number + 1 + use.calls]
            free = sum(after.act.computes + after.act.sleeps + after.call.seconds for after in meanwhile)
            if number + 1 + use.calls < len(of_rank):
                last = of_rank[number + 1 + use.calls].act
                free += use.share * (last.computes + last.sleeps)
            found.setdefault(key, []).append(free >= _LONG * call.seconds)
    found.pop(NO_CALL, None)
    return {key for key, holds in found.items() if all(holds) and len(holds) == len(script.of_key[key])}


def _waited_for_later(script: Script, keys: set[tuple[int, int]], uses: dict[Place, Use]) -> Script:
    def change(played: Sequence[Played]) -> Iterator[Played]:
        moved = {number: (call, uses[call.place]) for number, key, call in _waits(played) if key in keys}
        waits: dict[int, list[tuple[float, Call]]] = {}
        computes = sleeps = 0.0
        for number, one in enumerate(played):
            computes, sleeps, left = computes + one.act.computes, sleeps + one.act.sleeps, 1.0
            for share, call in sorted(waits.pop(number, []), key=lambda wait: wait[0]):
                part = share - (1.0 - left)
                yield Played(Act(WAIT, computes=computes * part, sleeps=sleeps * part), NO_CALL, call)
                left -= part
            act = with_(one.act, computes=computes * left, sleeps=sleeps * left)
            if number in moved:
                call, use = moved[number]
                waits.setdefault(number + 1 + use.calls, []).append((use.share, call))
                if act.call == WAIT:  # what the rank does before it, it does before the next one
                    computes, sleeps = act.computes, act.sleeps
                    continue
                act = with_(act, waits=False)
            computes = sleeps = 0.0
            yield Played(act, one.key, one.call)
        if played:
            yield from rest(computes, sleeps, played[-1])

    return script.changed(change)


CAUSE = BlockingCollectives()
