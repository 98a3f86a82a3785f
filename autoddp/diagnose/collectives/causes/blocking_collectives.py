"""The script waits for a collective whose result it reads only later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoddp.diagnose.collectives.cause import Cause, Job, Suspicion
from autoddp.diagnose.collectives.first_use import first_use
from autoddp.diagnose.collectives.merging import places_of, seconds_in
from autoddp.diagnose.collectives.program import NO_CALL, Played, Script, with_
from autoddp.units import milliseconds
from autoddp.wire.replayed_calls import WAIT, Act

_LONG = 0.2  # of a call, from which what comes after it could hide a part of it


class BlockingCollectives(Cause):
    in_words = "waiting for a result that is needed later"

    def suspect(self, job: Job) -> Iterator[Suspicion]:
        script = job.script
        if script is None:
            return
        uses = {}
        for of_rank in script.played.values():
            for one in of_rank:
                place = one.call.place
                if one.key != NO_CALL and one.act.waits and one.act.bytes and place not in uses:
                    uses[place] = first_use(place.file, place.line)
        keys = script.agreed(lambda one: uses.get(one.call.place) is not None) & _before_work(script)
        if not keys:
            return
        lines = places_of(script, keys)
        first = next(one for of_rank in script.played.values() for one in of_rank if one.key in keys)
        use = uses[first.call.place]
        assert use is not None
        read = f"is read in line {use.line} first" if use.line else "is not read any more before the block ends"
        took = seconds_in(script, keys)
        what = first.call.place.collective
        seen = f"{lines[0]} waits {milliseconds(took)} ms of each step for {what}, and {use.name} {read}"
        where = f"before line {use.line}" if use.line else "where its result is needed"
        fix = f"{lines[0]}: let it run meanwhile: work = dist.{what}(…, async_op=True), and work.wait() {where}"
        yield Suspicion(
            self.name,
            seen,
            fix,
            guess=took,
            changed=_waited_for_later(script, keys),
            tried="async_op=True, and the wait after what is computed next",
            lines=lines,
        )


def _before_work(script: Script) -> set[tuple[int, int]]:
    """The calls after which every rank computes for a while."""
    found: dict[tuple[int, int], bool] = {}
    for of_rank in script.played.values():
        for place, one in enumerate(of_rank):
            after = of_rank[place + 1].act if place + 1 < len(of_rank) else None
            long = after is not None and after.computes + after.sleeps >= _LONG * one.call.seconds
            found[one.key] = found.get(one.key, True) and long
    return {key for key, holds in found.items() if holds and key != NO_CALL}


def _waited_for_later(script: Script, keys: set[tuple[int, int]]) -> Script:
    def change(played: Sequence[Played]) -> Iterator[Played]:
        open_call = False
        for one in played:
            act = one.act
            if open_call:
                yield Played(Act(WAIT, computes=act.computes, sleeps=act.sleeps), NO_CALL, one.call)
                act, open_call = with_(act, computes=0.0, sleeps=0.0), False
            if one.key in keys:
                act, open_call = with_(act, waits=False), True
            yield Played(act, one.key, one.call)

    return script.changed(change)


CAUSE = BlockingCollectives()
