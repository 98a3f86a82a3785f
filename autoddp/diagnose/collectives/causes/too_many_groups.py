"""The script makes groups of the same ranks again and again, in place of keeping one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoddp.diagnose.collectives.cause import Cause, Job, Suspicion
from autoddp.diagnose.collectives.program import NO_CALL, Played, Script, with_
from autoddp.units import milliseconds
from autoddp.wire.replayed_calls import MAKE_GROUP, Act

_SHARE = 0.03  # of the recording
_FEWEST = 3  # groups of the same ranks


class TooManyGroups(Cause):
    in_words = "groups that are made again and again"

    def suspect(self, job: Job) -> Iterator[Suspicion]:
        made = Counter(group.ranks for group in job.recording.groups)
        ranks, count = made.most_common(1)[0] if made else ((), 0)
        seconds = places = 0.0
        for process in job.recording.of_rank.values():
            of_it = {place: one for place, one in process.sums.items() if place.collective == "new_group"}
            if sum(one.seconds for one in of_it.values()) > seconds:
                seconds = sum(one.seconds for one in of_it.values())
                places, where = sum(one.count for one in of_it.values()), next(iter(of_it)).where
        if not seconds or seconds < _SHARE * job.recording.seconds or count < _FEWEST:
            return
        per_step = seconds / job.recording.seconds * job.step
        seen = (
            f"{where} makes process groups {places:.0f} times, {milliseconds(seconds / places)} ms each, and {count} "
            "of them have the same ranks"
        )
        fix = f"{where}: make the group once, before the loop, and keep it: group = dist.new_group({list(ranks)})"
        again, once = _made_again(job.script) if job.script is not None else (None, None)
        why_not = "" if again else "no group was made between the calls that can be done again"
        yield Suspicion(
            self.name,
            seen,
            fix,
            guess=per_step,
            as_written=again,
            changed=once,
            tried="one group for the same ranks",
            why_not=why_not,
            lines=(where,),
        )


def _made_again(script: Script) -> tuple[Script | None, Script | None]:
    """The script with each group made before its first call, and with one group for the same ranks."""
    first: dict[tuple[int, ...], int] = {}
    for place, group in enumerate(script.groups):
        first.setdefault(group.ranks, place)
    same = {place: first[group.ranks] for place, group in enumerate(script.groups)}
    firsts = {key for key in script.of_key if key[1] == 0 and same[key[0]] != key[0]}
    if not firsts:
        return None, None

    def change(played: Sequence[Played], makes: bool) -> Iterator[Played]:
        for one in played:
            if makes and one.key in firsts:
                yield Played(Act(MAKE_GROUP, group=same[one.key[0]]), NO_CALL, one.call)
            yield Played(with_(one.act, group=same[one.key[0]]), one.key, one.call)

    again = replace(script, played={rank: tuple(change(of, makes=True)) for rank, of in script.played.items()})
    once = replace(script, played={rank: tuple(change(of, makes=False)) for rank, of in script.played.items()})
    return again, once


CAUSE = TooManyGroups()
